"""x -> float8 with one scale a row, of x [M, K], of x^T, or of both.

    amax  = max(max|row|, eps)
    scale = fmax / amax, or 1 where amax is 0, inf or NaN
    q     = cast(clamp(x * scale, -fmax, fmax)),   scale_inv = 1 / scale

[M, K] is x read as a matrix, ^n means rounded up to a multiple of n; whatever lies past M holds zeros.

| buffer | shape | dtype |
| --- | --- | --- |
| data | [M, K] | float8 |
| scale_inv | [M] | float32 |
| transpose | [K, M^16] | float8 |
| columnwise_scale_inv | [K] | float32 |

The columnwise buffers are the rowwise ones of x transposed, quantized on their own. A program reads its rows twice: for their amaxes, and
to cast them.
"""

from __future__ import annotations

import torch

from te_dynamo.kernels.layouts.row import RowForm
from te_dynamo.kernels.layouts.sizes import Size, rows_and_columns, transposed
from te_dynamo.kernels.quantize.current import Tile, cast_reference, scale_reference
from te_dynamo.kernels.runtime._triton import tl, triton
from te_dynamo.kernels.runtime.launch import launch
from te_dynamo.kernels.runtime.writes import writes
from te_dynamo.kernels.tiles.fp8 import (
    FLOAT32_MAX,
    abs_bits,
    load_values,
    saturating_cast,
    scale_from_amax,
    store_tile,
    zero_padded,
)

# --- reference ----------------------------------------------------------------------------------------------


def quantize_rowwise_reference(x: torch.Tensor, form: RowForm) -> list[torch.Tensor]:
    """`quantize_rowwise` in plain PyTorch, on any device."""
    rows, columns = rows_and_columns(x.shape)
    matrix = x.reshape(rows, columns)
    buffers: list[torch.Tensor] = []
    if form.rowwise:
        buffers += rows_reference(matrix, form)
    if form.columnwise:
        data, scale_inv = rows_reference(matrix.t(), form)
        buffers += [zero_padded(data, *transposed(rows, columns)), scale_inv]
    return buffers


def rows_reference(x: torch.Tensor, form: RowForm) -> tuple[torch.Tensor, torch.Tensor]:
    """data and scale_inv of x [M, K]."""
    amax = x.abs().amax(1).to(torch.float32) if x.numel() else x.new_zeros(x.shape[0], dtype=torch.float32)
    scale = scale_reference(amax, form.dtype, form.power_of_two, form.eps)
    return cast_reference(x.to(torch.float32) * scale[:, None], form.dtype).contiguous(), 1.0 / scale


# --- kernel -------------------------------------------------------------------------------------------------


@writes("data", "scale_inv")
@triton.jit
def quantize_rows_kernel(
    x,
    data,
    scale_inv,
    M,
    K,
    FMAX: tl.constexpr,
    EPS: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    TURNED: tl.constexpr,
    MATRICES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """data [M, K] and scale_inv [M] of BLOCK_M rows of x [M, K]; TURNED: data [K, M^16] and scale_inv [K] of rows of x^T.

    MATRICES: with TURNED, of every matrix of x [G, M, K], one behind the other.
    """
    if MATRICES:
        group = tl.program_id(1).to(tl.int64)
        x += group * M * K
        data += group * K * ((M + 15) // 16 * 16)
        scale_inv += group * K
    row = tl.program_id(0) * BLOCK_M
    quantize_rows(x, data, scale_inv, row, M, K, FMAX, EPS, POWER_OF_TWO, TURNED, BLOCK_M, BLOCK_K, x.dtype.element_ty)


@triton.jit
def quantize_rows(
    x, data, scale_inv, row, M, K,
    FMAX: tl.constexpr, EPS: tl.constexpr, POWER_OF_TWO: tl.constexpr, TURNED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """What one program of `quantize_rows_kernel` does, from `row` on, of x rounded to DTYPE."""
    rows = K if TURNED else M
    width = (M + 15) // 16 * 16 if TURNED else K
    bits = tl.zeros((BLOCK_M, BLOCK_K), tl.int32)
    for column in tl.range(0, width, BLOCK_K):
        bits = tl.maximum(bits, abs_bits(load_rows(x, row, column, M, K, TURNED, BLOCK_M, BLOCK_K, DTYPE)))
    amax = tl.max(bits, axis=1).to(tl.float32, bitcast=True)
    scale = scale_from_amax(amax, FMAX, EPS, POWER_OF_TWO, FLOAT32_MAX)
    inverse = tl.div_rn(tl.full((BLOCK_M,), 1.0, tl.float32), scale)
    places = row + tl.arange(0, BLOCK_M)
    tl.store(scale_inv + places, inverse, mask=places < rows)
    for column in tl.range(0, width, BLOCK_K):
        value = load_rows(x, row, column, M, K, TURNED, BLOCK_M, BLOCK_K, DTYPE)
        codes = saturating_cast(value, scale[:, None], data.dtype.element_ty)
        store_tile(data, codes, row, column, rows, width, BLOCK_M, BLOCK_K)


@triton.jit
def load_rows(
    x, row, column, M, K, TURNED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, DTYPE: tl.constexpr
):
    """A tile [BLOCK_M, BLOCK_K] of x [M, K], or for TURNED of x^T, rounded to DTYPE, in fp32, zero outside."""
    if TURNED:
        value = load_values(x, tl.cast(column, tl.int64), row, K, M, K, BLOCK_K, BLOCK_M)
        return tl.trans(value.to(DTYPE).to(tl.float32))
    else:
        return load_values(x, row, column, K, M, K, BLOCK_M, BLOCK_K).to(DTYPE).to(tl.float32)


# --- launcher -----------------------------------------------------------------------------------------------


def quantize_rowwise(x: torch.Tensor, form: RowForm) -> list[torch.Tensor]:
    """[data, scale_inv] if rowwise, + [transpose, columnwise_scale_inv] if columnwise, of x of any rank >= 1, bf16, fp16 or fp32."""
    x = x.contiguous()
    size = rows_and_columns(x.shape)
    buffers = list(form.allocate(size, x.device).values())
    for turned, data, scale_inv in zip([False] * form.rowwise + [True], buffers[::2], buffers[1::2], strict=False):
        launch_rows(x, data, scale_inv, size, turned, form)
    return buffers


def launch_rows(
    x: torch.Tensor, data: torch.Tensor, scale_inv: torch.Tensor, size: tuple[Size, Size], turned: bool, form: RowForm
) -> None:
    count = size[1] if turned else size[0]
    if isinstance(count, int) and count == 0:
        return
    block_m, block_k, warps = columns_tile(count) if turned else rows_tile(size[1])
    tile = {"TURNED": turned, "MATRICES": False, "BLOCK_M": block_m, "BLOCK_K": block_k}
    grid = (triton.cdiv(count, block_m),)
    launch(quantize_rows_kernel, grid, x, data, scale_inv, *size, **form.constants(), **tile, num_warps=warps)


# --- tile choice --------------------------------------------------------------------------------------------


def rows_tile(columns: int) -> Tile:
    """(rows, columns of a step, warps) of rows of x, the fastest on an H200: 16 values a thread, in few steps."""
    block_k = min(max(triton.next_power_of_2(columns), 16), 4096)
    return 4096 // block_k, block_k, 8


def columns_tile(columns: int) -> Tile:
    """The same of rows of x^T: narrower where fewer than three programs a multiprocessor would read 32 of them."""
    return (16, 1024, 8) if columns < 3 * 132 * 32 else (32, 512, 8)
