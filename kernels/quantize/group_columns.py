"""Columns of x [M, K] by groups of rows whose sizes only the device knows: tokens sorted by a mixture's experts, for wgrad.

    quantize_block_columns(x, offs, ...) = quantize_block(x in its padded order, columnwise), in blocks of 1x128
    quantize_mxfp8_columns(x, offs, ...) = quantize_mxfp8(x in its padded order, columnwise)

In its padded order (kernels/tiles/groups.py) each group begins with a block, so that blocks are those of the group's own tensor.
Nothing but the codes is padded in memory: each program reads its 128 rows where they are in x.
"""

from __future__ import annotations

import torch

from te_dynamo.kernels.layouts import block
from te_dynamo.kernels.layouts import mxfp8 as layout
from te_dynamo.kernels.layouts.sizes import allocate, round_up
from te_dynamo.kernels.quantize import float8_block, mxfp8
from te_dynamo.kernels.quantize.float8_block import quantize_block_elements, quantize_block_words
from te_dynamo.kernels.quantize.mxfp8_kernels import (
    quantize_elements,
    quantize_elements_128,
    quantize_words,
    quantize_words_128,
)
from te_dynamo.kernels.runtime._triton import tl, triton
from te_dynamo.kernels.runtime.launch import launch
from te_dynamo.kernels.runtime.writes import writes
from te_dynamo.kernels.tiles.block_words import packs
from te_dynamo.kernels.tiles.blocks import grouped_grid, grouped_tile
from te_dynamo.kernels.tiles.groups import padded_reference, padded_rows, source_of_padded

# --- references ---------------------------------------------------------------------------------------------


def quantize_block_columns_reference(
    x: torch.Tensor, offs: torch.Tensor, fp8_dtype: torch.dtype, power_of_two: bool, eps: float
) -> list[torch.Tensor]:
    """`quantize_block_columns` in plain PyTorch, on any device."""
    padded = padded_reference(x, offs)
    return float8_block.quantize_block_reference(padded, fp8_dtype, False, True, False, power_of_two, eps)


def quantize_mxfp8_columns_reference(
    x: torch.Tensor, offs: torch.Tensor, fp8_dtype: torch.dtype, scale_block: int
) -> list[torch.Tensor]:
    """`quantize_mxfp8_columns` in plain PyTorch, on any device."""
    return mxfp8.quantize_mxfp8_reference(padded_reference(x, offs), fp8_dtype, False, True, scale_block)


# --- launchers ----------------------------------------------------------------------------------------------


def quantize_block_columns(
    x: torch.Tensor, offs: torch.Tensor, fp8_dtype: torch.dtype, power_of_two: bool, eps: float
) -> list[torch.Tensor]:
    """[transpose [K, P], columnwise_scale_inv [P/128, K^4]] of x [M, K], bf16, fp16 or fp32, on a CUDA device; P = padded_rows(M, G).

    offs [G]: int32, ascending, at most M: the ends of the groups. What lies behind a group and behind the last one is zero.
    """
    x = x.contiguous()
    (m, k), groups = x.shape, offs.shape[0]
    rows = padded_rows(m, groups)
    buffers = allocate(block.buffers(rows, k, fp8_dtype, False, True, False), x.device)
    packed = power_of_two and packs(x)
    _, warps, together = float8_block.block_tile(True, False, packed)
    launch(
        quantize_block_columns_kernel,
        grouped_grid(rows, k, 128, together),
        *(x, offs, *buffers.values(), m, rows, k, groups),
        FMAX=torch.finfo(fp8_dtype).max,
        EPS=float(eps),
        POWER_OF_TWO=power_of_two,
        LARGEST=torch.finfo(x.dtype).max,
        GROUPS=triton.next_power_of_2(groups),
        GROUP_M=together,
        PACKED=packed,
        num_warps=warps,
    )
    return list(buffers.values())


def quantize_mxfp8_columns(
    x: torch.Tensor, offs: torch.Tensor, fp8_dtype: torch.dtype, scale_block: int
) -> list[torch.Tensor]:
    """[columnwise_data, columnwise_scale_inv], in the layouts of mxfp8.py for [P, K], of x [M, K] on a CUDA device. The rest is
    `quantize_block_columns`'s. Raises ValueError for another scale_block."""
    mxfp8.check_scale_block(scale_block)
    x = x.contiguous()
    (m, k), groups = x.shape, offs.shape[0]
    rows = padded_rows(m, groups)
    buffers = allocate(layout.buffers(rows, k, fp8_dtype, False, True, scale_block, False), x.device)
    packed = packs(x)
    constants = {"FMAX": torch.finfo(fp8_dtype).max, "GROUPS": triton.next_power_of_2(groups), "PACKED": packed}
    if scale_block == 128:
        _, together, warps = mxfp8.tile_128(packed)
        grid, kernel = grouped_grid(rows, k, 128, together), quantize_mxfp8_128_columns_kernel
        constants["GROUP_M"] = together
    else:
        block_m, block_k, warps = mxfp8.tile_32(k)
        grid, kernel = (round_up(k, 128) // block_k, 128 // block_m, rows // 128), quantize_mxfp8_columns_kernel
        constants |= {"BLOCK_M": block_m, "BLOCK_K": block_k}
    launch(kernel, grid, *(x, offs, *buffers.values(), m, rows, k, groups), **constants, num_warps=warps)
    return list(buffers.values())


# --- kernels ------------------------------------------------------------------------------------------------


@triton.jit
def in_padded_order(x, row, offs, M, K, G, GROUPS: tl.constexpr):
    """(where x [M, K] would begin if its padded order's 128 rows from `row` on were the rows there, the row before which they end)."""
    source, end = source_of_padded(row, offs, M, G, GROUPS)
    ahead = source - row
    return x + ahead.to(tl.int64) * K, end - ahead


@writes("transpose", "columnwise_scale_inv")
@triton.jit
def quantize_block_columns_kernel(
    x,
    offs,
    transpose,
    columnwise_scale_inv,
    M,
    P,
    K,
    G,
    FMAX: tl.constexpr,
    EPS: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    LARGEST: tl.constexpr,
    GROUPS: tl.constexpr,  # G rounded up to a power of two
    GROUP_M: tl.constexpr,
    PACKED: tl.constexpr,
):
    """A tile of 128 x 128 of the padded order a program, as kernels/quantize/float8_block.py's."""
    row, column = grouped_tile(128, GROUP_M)
    if row >= P:
        return
    x, last = in_padded_order(x, row, offs, M, K, G, GROUPS)
    if PACKED:
        quantize_block_words(
            *(x, transpose, transpose, transpose, columnwise_scale_inv, row, column, last, P, K),
            *(FMAX, EPS, False, False, True, 128, False),
        )
    else:
        quantize_block_elements(
            *(x, transpose, transpose, transpose, columnwise_scale_inv, row, column, last, P, K),
            *(FMAX, EPS, POWER_OF_TWO, LARGEST, False, False, True, 128),
        )


@writes("columnwise_data", "columnwise_scale_inv")
@triton.jit
def quantize_mxfp8_128_columns_kernel(
    x,
    offs,
    columnwise_data,
    columnwise_scale_inv,
    M,
    P,
    K,
    G,
    FMAX: tl.constexpr,
    GROUPS: tl.constexpr,
    PACKED: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """The same as kernels/quantize/mxfp8_kernels.py's for blocks of 128."""
    row, column = grouped_tile(128, GROUP_M)
    if row >= P:
        return
    x, last = in_padded_order(x, row, offs, M, K, G, GROUPS)
    if PACKED:
        quantize_words_128(
            *(x, columnwise_data, columnwise_data, columnwise_data, columnwise_scale_inv, row, column, last, P, K),
            *(FMAX, False, True, False, False),
        )
    else:
        quantize_elements_128(
            *(x, columnwise_data, columnwise_data, columnwise_data, columnwise_scale_inv, row, column, last, P, K),
            *(FMAX, False, True, False),
        )


@writes("columnwise_data", "columnwise_scale_inv")
@triton.jit
def quantize_mxfp8_columns_kernel(
    x,
    offs,
    columnwise_data,
    columnwise_scale_inv,
    M,
    P,
    K,
    G,
    FMAX: tl.constexpr,
    GROUPS: tl.constexpr,
    PACKED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The same for blocks of 32."""
    first, column = tl.program_id(2) * 128, tl.program_id(0) * BLOCK_K
    row = first + tl.program_id(1) * BLOCK_M
    x, last = in_padded_order(x, first, offs, M, K, G, GROUPS)
    if PACKED:
        quantize_words(
            *(x, columnwise_data, columnwise_data, columnwise_data, columnwise_scale_inv, row, column, last, P, K),
            *(FMAX, False, True, False, 32, BLOCK_M, BLOCK_K, False),
        )
    else:
        quantize_elements(
            *(x, columnwise_data, columnwise_data, columnwise_data, columnwise_scale_inv, row, column, last, P, K),
            *(FMAX, False, True, False, 32, BLOCK_M, BLOCK_K),
        )
