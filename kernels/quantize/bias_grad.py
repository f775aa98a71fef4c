"""dy -> float8, and the sums of its columns: what a linear with a bias does with the gradient of its output.

    dbias[k]  = sum over m of dy[m, k]           in fp32
    data, transpose, scale_inv = quantize(dy)    kernels/quantize/current.py

Launch 1 finds the amax, for which it reads all of dy, and so adds up the columns as well: each program walks down a stripe of
columns with one sum a thread and element in registers, and reduces them once, at its end. Launch 2 is `quantize`'s own.
"""

from __future__ import annotations

import torch

from te_dynamo.kernels.layouts.sizes import rows_and_columns
from te_dynamo.kernels.quantize.current import PARTIALS, Tile, quantize, quantize_reference
from te_dynamo.kernels.runtime._triton import tl, triton
from te_dynamo.kernels.runtime.launch import launch
from te_dynamo.kernels.runtime.writes import writes
from te_dynamo.kernels.tiles.fp8 import abs_bits, load_tile, store_partial_amax, store_tile

# --- reference ----------------------------------------------------------------------------------------------


def quantize_bias_grad_reference(
    dy: torch.Tensor, fp8_dtype: torch.dtype, rowwise: bool, columnwise: bool, power_of_two: bool, eps: float
) -> list[torch.Tensor]:
    """`quantize_bias_grad` in plain PyTorch."""
    dbias = dy.reshape(-1, dy.shape[-1]).sum(0, dtype=torch.float32)
    return [dbias, *quantize_reference(dy, fp8_dtype, rowwise, columnwise, power_of_two, eps)]


# --- kernel -------------------------------------------------------------------------------------------------


@triton.jit
def stripe(K, BLOCK_K: tl.constexpr):
    """(part, first column) of this program, one of those that share a stripe of BLOCK_K columns.

    Programs side by side read tiles side by side, from the first row on: the last rows are in the cache at the end, where
    launch 2 begins. Programs beyond the last stripe's have no tile: their part is past the last.
    """
    stripes = tl.cdiv(K, BLOCK_K)
    return tl.program_id(0) // stripes, (tl.program_id(0) % stripes) * BLOCK_K


@writes("partials", "sums")
@triton.jit
def amax_column_sums_kernel(
    dy, partials, sums, M, K, PARTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr
):
    """partials[program] = an amax; sums [PARTS, K] = the sums of every PARTS-th row of tiles."""
    part, column = stripe(K, BLOCK_K)
    bits = tl.zeros((BLOCK_M, BLOCK_K), tl.int32)
    total = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
    for row in range(tl.where(part < PARTS, part * BLOCK_M, M), M, PARTS * BLOCK_M):
        value = load_tile(dy, row, column, K, M, K, BLOCK_M, BLOCK_K)
        bits = tl.maximum(bits, abs_bits(value))
        total += value
    store_partial_amax(partials, bits)
    store_tile(sums, tl.sum(total, axis=0)[None, :], part, column, PARTS, K, 1, BLOCK_K)


# --- launcher -----------------------------------------------------------------------------------------------


def quantize_bias_grad(
    dy: torch.Tensor,
    fp8_dtype: torch.dtype,
    rowwise: bool,
    columnwise: bool,
    power_of_two: bool,
    eps: float,
    tile: Tile | None = None,
) -> list[torch.Tensor]:
    """[dbias, data?, transpose?, scale_inv] of dy, of any rank >= 1, read as [M, K]: dbias fp32 [K], the rest as `quantize`."""
    dy = dy.contiguous()
    rows, columns = rows_and_columns(dy.shape)
    block_m, block_k, parts = stripes(columns)
    partials = torch.empty(PARTIALS, dtype=torch.float32, device=dy.device)
    sums = torch.empty((parts, columns), dtype=torch.float32, device=dy.device)
    launch(
        amax_column_sums_kernel,
        (PARTIALS,),
        dy=dy,
        partials=partials,
        sums=sums,
        M=rows,
        K=columns,
        PARTS=parts,
        BLOCK_M=block_m,
        BLOCK_K=block_k,
        num_warps=8,
    )
    return [sums.sum(0), *quantize(dy, fp8_dtype, rowwise, columnwise, power_of_two, eps, partials, tile)]


def stripes(columns: int) -> tuple[int, int, int]:
    """(rows and columns of a tile, programs a stripe of columns): half a kilobyte a row of bf16, wider for more than 131072."""
    block_k = min(max(triton.next_power_of_2(columns), 16), 256)
    while triton.cdiv(columns, block_k) > PARTIALS:
        block_k *= 2
    return max(4096 // block_k, 1), block_k, PARTIALS // triton.cdiv(columns, block_k)
