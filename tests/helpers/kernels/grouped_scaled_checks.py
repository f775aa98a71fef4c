"""Products and columns of groups with scales of blocks against their references, for the interpreter and for a GPU."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from helpers.kernels import gemms
from helpers.kernels.gemm_operands import relative_error
from helpers.kernels.gemms import block_columns_request, block_rows_request, mxfp8_columns_request, mxfp8_rows_request
from helpers.kernels.grouped_operands import offsets
from helpers.kernels.kernel_cases import assert_same_bits
from torch.testing import assert_close

from te_dynamo.kernels.gemm.grouped_mxfp8 import multiply_groups
from te_dynamo.kernels.gemm.reference import reference
from te_dynamo.kernels.gemm.tiles import Tile
from te_dynamo.kernels.layouts.block import BlockForm
from te_dynamo.kernels.layouts.mxfp8 import MXFP8Form
from te_dynamo.kernels.quantize.float8_block import quantize_block, quantize_block_reference
from te_dynamo.kernels.quantize.mxfp8 import quantize_mxfp8, quantize_mxfp8_reference
from te_dynamo.kernels.tiles.groups import padded_reference

E4M3 = torch.float8_e4m3fn
SIZES = [[5, 0, 130, 61], [0, 0, 1], [128, 256, 0], [127, 2, 129, 0]]
BEHIND = 9
"""Rows behind the last group."""
N, K = 128, 160


def check(part: str, tiles_of: Callable[[bool], Sequence[Tile]], device: str) -> None:
    """Checks "block", "mxfp8" or "columns" for all SIZES, in the interpreter for two; `tiles_of` gives the tiles of weights with 2D scales,
    and of those with 1D."""
    for sizes in SIZES if device == "cuda" else SIZES[:2]:
        generator = torch.Generator().manual_seed(len(sizes))
        rows = sum(sizes) + BEHIND
        shapes = (rows, K), (rows, N), (len(sizes) * N, K)
        x, dy, weight = (torch.randn(shape, generator=generator).to(device) for shape in shapes)
        offs = offsets(sizes, device)
        if part == "block":
            check_block(x, dy, weight, offs, tiles_of)
        elif part == "mxfp8":
            check_mxfp8(x, dy, weight, offs)
        else:
            check_columns(x, dy, offs)


def check_block(
    x: torch.Tensor,
    dy: torch.Tensor,
    weight: torch.Tensor,
    offs: torch.Tensor,
    tiles_of: Callable[[bool], Sequence[Tile]],
) -> None:
    for two_d, tile in [(wide, tile) for wide in (True, False) for tile in tiles_of(wide)]:
        data, scales, turned, turned_scales = quantize_block_reference(
            weight, BlockForm(E4M3, True, True, two_d, True, 0.0)
        )
        for rows, of_weight, by_columns in ((x, (data, scales), False), (dy, (turned, turned_scales), True)):
            operands = *quantize_block_reference(rows, BlockForm(E4M3, True, False, False, True, 0.0)), *of_weight, offs
            form = torch.float32, two_d, by_columns
            want = gemms.gemm_grouped_block_reference(*operands, *form)
            assert_near(gemms.gemm_grouped_block_with_tile(tile, *operands, *form), want)
    columns = [t for rows in (dy, x) for t in block_columns_reference(rows, offs, True)]
    codes = [t for rows in (dy, x) for t in mxfp8_columns_reference(rows, offs, 128)]
    for operands, tile in itertools.product((columns, codes), tiles_of(False)):
        want = gemms.gemm_grouped_block_columns_reference(*operands, offs, torch.float32)
        assert_near(gemms.gemm_grouped_block_columns_with_tile(tile, *operands, offs, torch.float32), want)


def check_mxfp8(x: torch.Tensor, dy: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> None:
    """Experts in blocks of 32 are not whole blocks of 128."""
    for block, n in ((128, N), (32, 96)):
        weight, dy = weight.view(-1, N, K)[:, :n].reshape(-1, K), dy[:, :n].contiguous()
        row, row_scales, column, column_scales = quantize_mxfp8_reference(weight, MXFP8Form(E4M3, True, True, block))
        for rows, of_weight, by_columns in ((x, (row, row_scales), False), (dy, (column, column_scales), True)):
            operands = (
                *quantize_mxfp8_reference(rows, MXFP8Form(E4M3, True, False, block)),
                *of_weight,
                offs,
                torch.float32,
            )
            if block == 32:
                request = mxfp8_rows_request(*operands, by_columns)
            else:
                request = block_rows_request(*operands, False, by_columns)
            got = multiply_groups(request)
            assert_near(got, reference(request))
            if (
                by_columns and block == 32
            ):  # the last tile of an expert has rows of the next one, which must not reach it
                column.view(torch.uint8)[-n:] = 0x7F
                column_scales.view(torch.uint8)[(len(column) - n) // 32 :] = 0xFF
                start = int(offs[-2])
                assert torch.equal(multiply_groups(request)[:start], got[:start])
        operands = [t for rows in (dy, x) for t in mxfp8_columns_reference(rows, offs, block)]
        columns = mxfp8_columns_request if block == 32 else block_columns_request
        request = columns(*operands, offs, torch.float32)
        assert_near(multiply_groups(request), reference(request))


def block_columns_reference(x: torch.Tensor, offs: torch.Tensor, power_of_two: bool) -> list[torch.Tensor]:
    return quantize_block_reference(padded_reference(x, offs), BlockForm(E4M3, False, True, False, power_of_two, 0.0))


def mxfp8_columns_reference(x: torch.Tensor, offs: torch.Tensor, block: int) -> list[torch.Tensor]:
    return quantize_mxfp8_reference(padded_reference(x, offs), MXFP8Form(E4M3, False, True, block))


def check_columns(x: torch.Tensor, dy: torch.Tensor, offs: torch.Tensor) -> None:
    """Of values that are not packed: the interpreter lacks the instructions on words."""
    for values in (x, dy):
        for block in (32, 128):
            want = mxfp8_columns_reference(values, offs, block)
            assert_same_bits(
                quantize_mxfp8(values, MXFP8Form(E4M3, False, True, block), offs=offs), want, (block, offs.tolist())
            )
        for power_of_two in (True, False):
            want = block_columns_reference(values, offs, power_of_two)
            assert_same_bits(
                quantize_block(values, BlockForm(E4M3, False, True, False, power_of_two, 0.0), offs=offs),
                want,
                offs.tolist(),
            )


def assert_near(got: torch.Tensor, want: torch.Tensor) -> None:
    """Sums in another order; a GPU's tensor cores keep some bits fewer of a sum than fp32 has."""
    if got.is_cuda:
        assert relative_error(got, want.double()) < 1e-3
    else:
        assert_close(got, want, rtol=1e-5, atol=1e-4)
