"""The columnwise data of a float8 tensor from its rowwise data: codes [M, K] -> [K, M rounded up to 16], padding zero.

With one scale a tensor both hold the same codes, so that a transposition of the one makes the other, bit for bit. It reads one
byte an element where `quantize` reads two or four, and at a time when what was quantized is gone.
"""

from __future__ import annotations

import torch

from te_dynamo.kernels.layouts.sizes import rows_and_columns, transposed
from te_dynamo.kernels.quantize.current import CAST_TILE, Tile, cast_tile
from te_dynamo.kernels.runtime._triton import tl, triton
from te_dynamo.kernels.runtime.launch import launch
from te_dynamo.kernels.runtime.writes import writes
from te_dynamo.kernels.tiles.fp8 import program_count, tile_from_the_end, tile_total, zero_padded
from te_dynamo.kernels.tiles.row_quarters import load_codes, store_codes


def transpose_reference(data: torch.Tensor) -> torch.Tensor:
    """`transpose` in plain PyTorch, on any device."""
    rows, columns = rows_and_columns(data.shape)
    return zero_padded(data.reshape(rows, columns).t(), *transposed(rows, columns))


@writes("transpose")
@triton.jit
def transpose_kernel(data, transpose, M, K, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):
    """Every tile of data [M, K] to its place in transpose [K, M rounded up to 16], four rows of a column as one word."""
    codes = data.to(tl.pointer_type(tl.int8), bitcast=True)
    tiles = tile_total(M, K, BLOCK_M, BLOCK_K)
    for index in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=1):
        row, column = tile_from_the_end(index, tiles, K, BLOCK_M, BLOCK_K)
        c0 = load_codes(codes, row, column, M, K, 0, BLOCK_M, BLOCK_K)
        c1 = load_codes(codes, row, column, M, K, 1, BLOCK_M, BLOCK_K)
        c2 = load_codes(codes, row, column, M, K, 2, BLOCK_M, BLOCK_K)
        c3 = load_codes(codes, row, column, M, K, 3, BLOCK_M, BLOCK_K)
        store_codes((c0, c1, c2, c3), (row, column, K, M, K), data, transpose, False, BLOCK_M, BLOCK_K)


def transpose(data: torch.Tensor, tile: Tile | None = None) -> torch.Tensor:
    """data of any rank >= 1 and one byte an element, read as [M, K], transposed: [K, M rounded up to 16]."""
    data = data.contiguous()
    rows, columns = rows_and_columns(data.shape)
    result = torch.empty(transposed(rows, columns), dtype=data.dtype, device=data.device)
    block_m, block_k, warps = tile or cast_tile(rows, columns, True, CAST_TILE)
    launch(
        transpose_kernel,
        (program_count(rows, columns, block_m, block_k, data.device),),
        data=data,
        transpose=result,
        M=rows,
        K=columns,
        BLOCK_M=block_m,
        BLOCK_K=block_k,
        num_warps=warps,
    )
    return result
