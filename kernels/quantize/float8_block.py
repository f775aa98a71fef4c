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

from collections.abc import Iterator
from typing import Any

import torch

from te_dynamo.kernels.layouts import block
from te_dynamo.kernels.layouts.block import BLOCK, BlockForm
from te_dynamo.kernels.layouts.sizes import Size, blocks_of, rows_and_columns, transposed
from te_dynamo.kernels.quantize.block_kernels import quantize_block_kernel
from te_dynamo.kernels.quantize.current import cast_reference, scale_reference
from te_dynamo.kernels.runtime.launch import launch
from te_dynamo.kernels.tiles.block_words import packs, whole_tiles
from te_dynamo.kernels.tiles.blocks import group_of_rows, grouped_grid
from te_dynamo.kernels.tiles.fp8 import zero_padded
from te_dynamo.kernels.tiles.groups import padded_order

# --- reference ----------------------------------------------------------------------------------------------


def quantize_block_reference(x: torch.Tensor, form: BlockForm) -> list[torch.Tensor]:
    """`quantize_block` in plain PyTorch, on any device."""
    rows, columns = rows_and_columns(x.shape)
    matrix = x.reshape(rows, columns)
    buffers: list[torch.Tensor] = []
    if form.rowwise:
        buffers += _rowwise_reference(matrix, form)
    if form.columnwise:
        data, scale_inv = _rowwise_reference(matrix.t(), form)
        buffers += [zero_padded(data, *transposed(rows, columns)), scale_inv]
    return buffers


def _rowwise_reference(x: torch.Tensor, form: BlockForm) -> tuple[torch.Tensor, torch.Tensor]:
    """data and scale_inv of x [M, K]."""
    rows, columns = x.shape
    tile_rows = BLOCK if form.two_d else 1
    tiles_m, tiles_k = blocks_of(rows, tile_rows), blocks_of(columns, BLOCK)
    tiles = zero_padded(x, tiles_m * tile_rows, tiles_k * BLOCK).view(tiles_m, tile_rows, tiles_k, BLOCK)
    amax = tiles.abs().amax(dim=(1, 3)).to(torch.float32)
    scale = scale_reference(amax, form.dtype, form.power_of_two, form.eps, torch.finfo(x.dtype).max)
    value = (tiles.to(torch.float32) * scale[:, None, :, None]).view(tiles_m * tile_rows, tiles_k * BLOCK)
    grid = 1.0 / scale if form.two_d else (1.0 / scale).t()
    return cast_reference(value[:rows, :columns], form.dtype), zero_padded(
        grid, *block.scale_shape(rows, columns, form.two_d)
    )


# --- launcher -----------------------------------------------------------------------------------------------


BlockTile = tuple[int, int, int]
"""(rows of a tile, warps, rows of tiles walked together); a tile has 128 columns."""


def quantize_block(
    x: torch.Tensor, form: BlockForm, tile: BlockTile | None = None, offs: torch.Tensor | None = None
) -> list[torch.Tensor]:
    """[data, scale_inv] if rowwise, + [transpose, columnwise_scale_inv] if columnwise, of x of any rank >= 1.

    x [M, K] is bfloat16, float16 or float32. One launch that reads x once, for fp32 with both usages two. `tile` overrides `block_tile`. offs: int32 [G], ascending,
    at most M, the ends of groups: of x in its padded order (kernels/tiles/groups.py), so that each group begins with a block. Nothing but the
    codes is padded in memory: each program reads its 128 rows where they are in x.
    """
    x = x.contiguous()
    rows, columns = rows_and_columns(x.shape)
    order, rows = padded_order(x, rows, offs)
    buffers = form.allocate((rows, columns), x.device)
    if isinstance(rows, int) and rows * columns == 0:
        return list(buffers.values())
    packed = form.power_of_two and packs(x)
    given = {"x": x, "M": rows, "K": columns, **order, **form.pointers(buffers, unused=x)}
    largest = torch.finfo(x.dtype).max
    for _, grid, constants in block_launches(
        form, (rows, columns), x.element_size(), packed, tile, largest, offs is None
    ):
        launch(quantize_block_kernel, grid, **given, **constants)
    return list(buffers.values())


def block_launches(
    form: BlockForm,
    size: tuple[Size, Size],
    itemsize: int,
    packed: bool,
    tile: BlockTile | None,
    largest: float,
    as_it_lies: bool = True,
) -> Iterator[tuple[bool, tuple[Size, ...], dict[str, Any]]]:
    """(True, the grid, the constants) of each launch on [M, K], as `mxfp8_launches`; largest: of x's dtype."""
    grid, constants = block_launch(size, tile or block_tile(form.columnwise, form.two_d, packed), packed, as_it_lies)
    for usage in form.launches(itemsize):
        yield True, grid, {**form.constants(), "LARGEST": largest, **usage, **constants}


def block_launch(
    size: tuple[Size, Size], tile: BlockTile, packed: bool, as_it_lies: bool = True
) -> tuple[tuple[Size, ...], dict[str, Any]]:
    """(the grid, the constants of the tile) of a launch on [M, K]. as_it_lies: not in a padded order."""
    rows, warps, group = tile
    group = group_of_rows(size[0], rows, group)
    whole = as_it_lies and whole_tiles(*size, rows)
    constants = {"ROWS": rows, "GROUP_M": group, "PACKED": packed, "WHOLE": whole, "num_warps": warps}
    return grouped_grid(*size, rows, group), constants


def block_tile(columnwise: bool, two_d: bool, packed: bool) -> BlockTile:
    """Rows, warps and group of a launch, the fastest on an H200 at 8192x4096 (benchmarks/quantize.py --sweep). With 4 warps a
    whole tile leaves registers for several programs a multiprocessor: one loads while another computes. Values that are not
    packed need twice the registers."""
    if columnwise or two_d:
        return (128, 4, 4) if packed else (128, 8, 8)
    return 64, 4, 1
