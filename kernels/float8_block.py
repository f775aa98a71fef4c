"""x -> float8 with one scale for every 1x128 or 128x128 block, rowwise, transposed or both.

    amax  = max(max|block|, eps)
    scale = fmax / amax, or 1 where amax is 0, inf or NaN; an infinite quotient is the largest value of x's dtype
    q     = cast(clamp(x * scale, -fmax, fmax)),   scale_inv = 1 / scale

[M, K] is x read as a matrix, ^n means rounded up to a multiple of n; whatever lies past M or K holds zeros.

| buffer | shape | dtype |
| --- | --- | --- |
| data | [M, K] | float8 |
| scale_inv, 1x128 | [ceil(K/128), M^4]: of block kb of row m at [kb, m] | float32 |
| scale_inv, 128x128 | [ceil(M/128), ceil(K/128)^4] | float32 |
| transpose | [K, M^16] | float8 |
| columnwise_scale_inv | the shape of scale_inv with M and K exchanged | float32 |

The columnwise buffers are the rowwise ones of x transposed: blocks of 128x1, quantized independently of the 1x128
ones, or the same blocks of 128x128. Rules: numerics of Transformer Engine's block scaling.
"""

from __future__ import annotations

import torch

from te_dynamo.kernels.fp8 import round_up_16, rows_and_columns
from te_dynamo.kernels.quantize import scale_reference

__all__ = ["BLOCK", "quantize_block_reference"]

BLOCK = 128


# --- reference ----------------------------------------------------------------------------------------------


def quantize_block_reference(
    x: torch.Tensor,
    fp8_dtype: torch.dtype,
    rowwise: bool,
    columnwise: bool,
    two_d: bool,
    power_of_two: bool,
    eps: float,
) -> list[torch.Tensor]:
    """`quantize_block` in plain PyTorch, on any device."""
    rows, columns = rows_and_columns(x)
    matrix = x.reshape(rows, columns)
    buffers = []
    if rowwise:
        buffers += _rowwise_reference(matrix, fp8_dtype, two_d, power_of_two, eps)
    if columnwise:
        data, scale_inv = _rowwise_reference(matrix.t(), fp8_dtype, two_d, power_of_two, eps)
        transpose = _padded(data.view(torch.uint8), columns, round_up_16(rows)).view(fp8_dtype)
        buffers += [transpose, scale_inv]
    return buffers


def _rowwise_reference(
    x: torch.Tensor, fp8_dtype: torch.dtype, two_d: bool, power_of_two: bool, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """data and scale_inv of x [M, K]."""
    rows, columns = x.shape
    tile_rows = BLOCK if two_d else 1
    tiles_m, tiles_k = -(-rows // tile_rows), -(-columns // BLOCK)
    tiles = _padded(x, tiles_m * tile_rows, tiles_k * BLOCK).view(tiles_m, tile_rows, tiles_k, BLOCK)
    amax = tiles.abs().amax(dim=(1, 3)).to(torch.float32)
    scale = scale_reference(amax, fp8_dtype, power_of_two, eps, torch.finfo(x.dtype).max)
    fmax = torch.finfo(fp8_dtype).max
    value = (tiles.to(torch.float32) * scale[:, None, :, None]).clamp_(-fmax, fmax)
    value = value.view(tiles_m * tile_rows, tiles_k * BLOCK)[:rows, :columns]
    value = value.masked_fill(value.isnan(), torch.nan)  # one NaN, as the hardware casts it: a CPU would keep its sign
    grid = 1.0 / scale if two_d else (1.0 / scale).t()
    return value.to(fp8_dtype), _padded(grid, grid.shape[0], -(-grid.shape[1] // 4) * 4)


def _padded(x: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """x at the upper left of zeros [rows, columns]."""
    result = x.new_zeros(rows, columns)
    result[: x.shape[0], : x.shape[1]] = x
    return result
