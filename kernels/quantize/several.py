"""Several tensors -> the rows that `te.quantize` gives each, in buffers of its own, in one launch.

A launch takes the CPU longer than a small cast takes the GPU. Each element has the bits that its format's kernel gives it, of values rounded
to another dtype before where that is asked for. Formats: one scale a tensor, a row or a block of any size, but NVFP4.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from te_dynamo.kernels.layouts.block import BlockForm
from te_dynamo.kernels.layouts.form import Form
from te_dynamo.kernels.layouts.mxfp8 import MXFP8Form
from te_dynamo.kernels.layouts.row import RowForm
from te_dynamo.kernels.layouts.sizes import blocks_of
from te_dynamo.kernels.quantize.block_kernels import quantize_block_tile
from te_dynamo.kernels.quantize.current import Tile
from te_dynamo.kernels.quantize.float8_rowwise import quantize_rows, rows_tile
from te_dynamo.kernels.quantize.formats import reference_of
from te_dynamo.kernels.quantize.mxfp8_kernels import quantize_mxfp8_tile
from te_dynamo.kernels.runtime._triton import tl, triton
from te_dynamo.kernels.runtime.capture import is_captured
from te_dynamo.kernels.runtime.launch import launch
from te_dynamo.kernels.tiles.blocks import load_quarters
from te_dynamo.kernels.tiles.fp8 import FLOAT32_MAX, load_values, saturating_cast, scale_from_amax, tile_origin

SPAN = 65_536
"""Values that a program casts of a tensor with one scale."""

_CAPTURED: list[torch.Tensor] = []
"""The tables that CUDA graphs copy from the host at each replay: kept, a kilobyte each, since nobody says when a graph ends."""


def quantize_several_reference(
    xs: Sequence[torch.Tensor], dtype: torch.dtype, form: Form, amaxes: Sequence[torch.Tensor] = ()
) -> list[list[torch.Tensor]]:
    """`quantize_several` in plain PyTorch, on any device."""
    return [reference_of(x.to(dtype), form, *amaxes[i : i + 1]) for i, x in enumerate(xs)]


# --- kernel -------------------------------------------------------------------------------------------------


@triton.jit
def quantize_several_kernel(
    table,
    x_like,
    codes_like,
    scale_like,
    COUNT: tl.constexpr,
    DTYPE: tl.constexpr,
    SCALING: tl.constexpr,
    FMAX: tl.constexpr,
    EPS: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    LARGEST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One tile, or span, of one tensor. table int64 [7, COUNT]: a tensor's first program, M and K, the addresses of values, codes, scales and,
    for one scale a tensor, amax. SCALING: "tensor", "row", that of `quantize_block_tile`, or "32x32" of MXFP8.

    x_like, codes_like, scale_like: one of the tensors each, for the dtypes.
    """
    firsts = tl.load(table + tl.arange(0, COUNT))
    which = tl.sum((firsts <= tl.program_id(0)).to(tl.int32), axis=0) - 1
    table += which
    tile = tl.program_id(0) - tl.load(table).to(tl.int32)
    M = tl.load(table + COUNT).to(tl.int32)
    K = tl.multiple_of(tl.load(table + 2 * COUNT).to(tl.int32), 16)
    x = tl.multiple_of(tl.load(table + 3 * COUNT).to(x_like.dtype), 16)
    codes = tl.multiple_of(tl.load(table + 4 * COUNT).to(codes_like.dtype), 16)
    scale_inv = tl.load(table + 5 * COUNT).to(scale_like.dtype)
    if SCALING == "tensor":
        amax = tl.load(tl.load(table + 6 * COUNT).to(scale_like.dtype))
        scale = scale_from_amax(amax, FMAX, EPS, POWER_OF_TWO, FLOAT32_MAX)
        if tile == 0:
            tl.store(scale_inv, tl.div_rn(tl.full((), 1.0, tl.float32), scale))
        begin, size = tile.to(tl.int64) * BLOCK_M * BLOCK_K, M.to(tl.int64) * K
        for start in range(0, BLOCK_M * BLOCK_K, BLOCK_K):
            offsets = begin + start + tl.arange(0, BLOCK_K)
            value = tl.load(x + offsets, mask=offsets < size, other=0.0).to(DTYPE)
            tl.store(codes + offsets, saturating_cast(value, scale, codes.dtype.element_ty), mask=offsets < size)
    elif SCALING == "row":
        quantize_rows(
            *(x, codes, scale_inv, tile * BLOCK_M, M, K),
            *(FMAX, EPS, POWER_OF_TWO, False, BLOCK_M, BLOCK_K, DTYPE),
        )
    else:
        row, column = tile_origin(tile, K, BLOCK_M, BLOCK_K)
        buffers = codes, scale_inv, codes, scale_inv
        place = row, column, M, K
        if SCALING == "32x32":
            values = load_values(x, row, column, K, M, K, BLOCK_M, BLOCK_K).to(DTYPE)
            SQUARES: tl.constexpr = (FMAX, True, False, False, 32, True, BLOCK_M, BLOCK_K)
            quantize_mxfp8_tile(values, buffers, place, SQUARES, False, False)
        else:
            x0, x1, x2, x3 = load_quarters(x, row, column, M, K, BLOCK_M)
            quarters = x0.to(DTYPE), x1.to(DTYPE), x2.to(DTYPE), x3.to(DTYPE)
            BLOCKS: tl.constexpr = (SCALING, FMAX, EPS, POWER_OF_TWO, LARGEST, True, False, BLOCK_M)
            quantize_block_tile(quarters, buffers, place, BLOCKS, False, False)


# --- launcher -----------------------------------------------------------------------------------------------


def quantize_several(
    xs: Sequence[torch.Tensor], dtype: torch.dtype, form: Form, amaxes: Sequence[torch.Tensor] = ()
) -> list[list[torch.Tensor]]:
    """[data [M, K], scale_inv] of each of xs [M, K], as of x.to(dtype). amaxes: fp32 [1] of each, for one scale a tensor. xs have one dtype and
    one device; each K is a multiple of 16.

    form: rows alone; of MXFP8 in 2D, not swizzled. Not for graphs: the addresses are those of this call.
    """
    assert form.rowwise and not form.columnwise and all(x.shape[1] % 16 == 0 for x in xs)
    xs = [
        x if x.is_contiguous() and x.data_ptr() % 16 == 0 else x.clone(memory_format=torch.contiguous_format)
        for x in xs
    ]
    buffers = [list(form.allocate(x.shape, x.device).values()) for x in xs]
    scaling, tile = scaling_and_tile(form, max(x.shape[1] for x in xs))
    *firsts, programs = itertools.accumulate((_programs(scaling, tile, *x.shape) for x in xs), initial=0)
    addresses = [[each.data_ptr() for each in tensors] for tensors in (xs, *zip(*buffers, strict=True), amaxes)]
    rows = [firsts, *([x.shape[i] for x in xs] for i in (0, 1)), *addresses]
    unused = [programs] * (triton.next_power_of_2(len(xs)) - len(xs))
    filled = [[*row, *unused] for row in rows if row]
    table = torch.tensor(filled, dtype=torch.int64, pin_memory=xs[0].is_cuda)
    if is_captured(xs[0].device):
        _CAPTURED.append(table)
    table = table.to(xs[0].device, non_blocking=True)
    if programs:
        cast_several(table, programs, xs[0], buffers[0], dtype, form, scaling, tile)
    return buffers


def cast_several(
    table: torch.Tensor,
    programs: int,
    x_like: torch.Tensor,
    buffers_like: Sequence[torch.Tensor],
    dtype: torch.dtype,
    form: Form,
    scaling: str,
    tile: Tile,
) -> None:
    """The launch."""
    block_m, block_k, warps = tile
    launch(
        quantize_several_kernel,
        (programs,),
        table=table,
        x_like=x_like,
        codes_like=buffers_like[0],
        scale_like=buffers_like[1],
        COUNT=table.shape[1],
        DTYPE=getattr(tl, str(dtype).removeprefix("torch.")),
        **{"EPS": 0.0, "POWER_OF_TWO": True, **form.constants(), "SCALING": scaling},
        LARGEST=torch.finfo(dtype).max,
        BLOCK_M=block_m,
        BLOCK_K=block_k,
        num_warps=warps,
    )


def scaling_and_tile(form: Form, columns: int) -> tuple[str, Tile]:
    """(the kernel's SCALING, rows and columns of a tile, warps); columns: the most of a tensor."""
    if isinstance(form, RowForm):
        return "row", rows_tile(columns)
    if isinstance(form, BlockForm):
        return form.constants()["SCALING"], (128, 128, 8)
    if isinstance(form, MXFP8Form):
        assert form.two_d and not form.swizzled
        return ("e8m0 128x128", (128, 128, 8)) if form.turns else ("32x32", (32, 128, 2))
    return "tensor", (SPAN // 4096, 4096, 8)


def _programs(scaling: str, tile: Tile, rows: int, columns: int) -> int:
    if scaling == "tensor":  # one at least, for the scale
        return max(blocks_of(rows * columns, SPAN), 1)
    if scaling == "row":
        return blocks_of(rows, tile[0])
    # Scales of blocks are padded to 128 rows and 128 columns of values.
    return blocks_of(rows, 128) * (128 // tile[0]) * blocks_of(columns, 128)
