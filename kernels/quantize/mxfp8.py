"""MXFP8: float8 data with one power of two for every block of 32 or 128 values, held as an 8-bit exponent (E8M0).

    e = E8M0(max|block| * (1 / fmax)), rounded up
    q = cast(clamp(x * 2^(127 - e), -fmax, fmax)),   x ~ q * 2^(e - 127)

Code 0 is 2^-127, also for a block of zeros; 254 is the largest, also for a block with an infinity; 255 is NaN, and makes
every element of its block NaN. (Rule: OCP Microscaling Formats v1.0, with the scale rounded up so that nothing saturates.)

Of x read as [M, K], n^m being n rounded up to a multiple of m, and every padding zero:

| usage | blocks | data | scale_inv, uint8 |
| --- | --- | --- | --- |
| rowwise, either block | 1 x block | [M, K] | (M^128, ceil(K/32)^4) |
| columnwise, blocks of 32 | 32 x 1 | [M, K] | (ceil(M/32)^4, K^128) |
| columnwise, blocks of 128 | 128 x 1 | [K, M^16], transposed | (K^128, ceil(M/32)^4): the rowwise form of x^T |

`two_d`: a scale for block x block values, in the same places, once for each row and each column. So rows and columns are the same values;
blocks of 32x32 have one `data` for both usages.

Scales may be swizzled instead (kernels/layouts/tiled_scales.py); columnwise ones of blocks of 32 then as their transpose, like all others.

A block of 128 has its code four times, once for every 32 values, so that both are the same format to who reads it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from te_dynamo.kernels.layouts import mxfp8
from te_dynamo.kernels.layouts.mxfp8 import BLOCK, MXFP8Form, columnwise_names, powers_of_two
from te_dynamo.kernels.layouts.sizes import Size, blocks_of, round_up, rows_and_columns, transposed
from te_dynamo.kernels.layouts.tiled_scales import plain_scales, swizzle_scales
from te_dynamo.kernels.quantize.block_kernels import quantize_block_kernel
from te_dynamo.kernels.quantize.current import cast_reference
from te_dynamo.kernels.quantize.float8_block import block_launch
from te_dynamo.kernels.quantize.mxfp8_kernels import dequantize_mxfp8_kernel, quantize_mxfp8_kernel
from te_dynamo.kernels.runtime._triton import triton
from te_dynamo.kernels.runtime.launch import launch
from te_dynamo.kernels.tiles.block_words import packs, whole_tiles
from te_dynamo.kernels.tiles.blocks import group_of_rows
from te_dynamo.kernels.tiles.fp8 import zero_padded
from te_dynamo.kernels.tiles.groups import padded_order

# --- reference ----------------------------------------------------------------------------------------------


def quantize_mxfp8_reference(x: torch.Tensor, form: MXFP8Form) -> list[torch.Tensor]:
    """`quantize_mxfp8` in plain PyTorch, on any device."""
    rows, columns = rows_and_columns(x.shape)
    matrix = x.reshape(rows, columns)
    buffers: dict[str, torch.Tensor] = {}
    if form.rowwise:
        buffers["data"], scale_inv = _quantize_rows(matrix, form)
        buffers["scale_inv"] = swizzle_scales(scale_inv) if form.swizzled else scale_inv
    if form.columnwise:
        data, scale_inv = _quantize_rows(matrix.t(), form)
        data = zero_padded(data, *transposed(rows, columns)) if form.turns else data.t().contiguous()
        in_order = scale_inv if form.turns else scale_inv.t().contiguous()
        names = columnwise_names(form.scale_block, form.two_d)
        buffers |= zip(names, (data, swizzle_scales(scale_inv) if form.swizzled else in_order), strict=True)
    return list(buffers.values())


def dequantize_mxfp8_reference(
    data: torch.Tensor, scale_inv: torch.Tensor, columnwise: bool, dtype: torch.dtype
) -> torch.Tensor:
    """`dequantize_mxfp8` in plain PyTorch, on any device."""
    scale_inv = _in_order(scale_inv, columnwise)
    if columnwise:
        return dequantize_mxfp8_reference(data.t(), scale_inv.t(), False, dtype).t().contiguous()
    rows, columns = data.shape
    codes = scale_inv[:rows].repeat_interleave(BLOCK, dim=1)[:, :columns]
    return (data.to(torch.float32) * powers_of_two(codes)).to(dtype)


def _in_order(scale_inv: torch.Tensor, columnwise: bool) -> torch.Tensor:
    """Scales as the module's table has them."""
    return plain_scales(scale_inv).t().contiguous() if columnwise and scale_inv.dim() == 3 else plain_scales(scale_inv)


def _quantize_rows(x: torch.Tensor, form: MXFP8Form) -> tuple[torch.Tensor, torch.Tensor]:
    """Data [R, C] and codes (R^128, ceil(C/32)^4) of x [R, C] in blocks along its rows."""
    rows, columns = x.shape
    scale_block, tall = form.scale_block, form.scale_block if form.two_d else 1
    padded = zero_padded(x.to(torch.float32), rows, round_up(columns, scale_block))
    blocks = padded.reshape(rows, padded.shape[1] // scale_block, scale_block)
    amax = blocks.abs().amax(-1)
    of_tiles = zero_padded(amax, round_up(rows, tall), amax.shape[1]).unflatten(0, (-1, tall)).amax(1)
    codes = _codes(of_tiles.repeat_interleave(tall, dim=0)[:rows], form.dtype)
    inverse = powers_of_two(torch.where(codes == 255, 255, 254 - codes))
    value = (blocks * inverse.unsqueeze(-1)).flatten(1)[:, :columns]
    codes = codes.repeat_interleave(scale_block // BLOCK, dim=1)[:, : blocks_of(columns, BLOCK)]
    scale_inv = zero_padded(codes.to(torch.uint8), *mxfp8.scale_shape(rows, columns))
    return cast_reference(value, form.dtype), scale_inv


def _codes(amax: torch.Tensor, fp8_dtype: torch.dtype) -> torch.Tensor:
    """E8M0 of amax * (1 / fmax), fp32, rounded up: int32. A code is the exponent field, plus one where anything follows it."""
    bits = (amax * (1.0 / torch.finfo(fp8_dtype).max)).view(torch.int32)
    rounded = ((bits + 0x7FFFFF) >> 23).clamp(max=254)
    rounded = torch.where(bits <= 0x00400000, 0, rounded)  # up to 2^-127, which is what code 0 means
    return torch.where(amax.isnan(), 255, rounded)


# --- launchers ----------------------------------------------------------------------------------------------


def quantize_mxfp8(
    x: torch.Tensor, form: MXFP8Form, tile: Tile | None = None, offs: torch.Tensor | None = None
) -> list[torch.Tensor]:
    """[data, scale_inv] if rowwise, + [columnwise_data, columnwise_scale_inv] if columnwise, of x on a CUDA device.

    x: bfloat16, float16 or float32 of any rank >= 1, read as [M, K]; M may be symbolic. Buffers: the module's table.
    One launch that reads x once; two for fp32 in blocks of 128 with both usages. `tile` overrides `row_tile`, `tile_32` or `tile_128`.
    offs: as quantize_block takes it.
    """
    x = x.contiguous()
    rows, columns = rows_and_columns(x.shape)
    order, rows = padded_order(x, rows, offs)
    buffers = form.allocate((rows, columns), x.device)
    if isinstance(rows, int) and rows * columns == 0:
        return list(buffers.values())
    given = {"x": x, "M": rows, "K": columns, **order, **form.pointers(buffers, unused=x)}
    for turned, grid, constants in mxfp8_launches(
        form, (rows, columns), x.element_size(), packs(x), tile, offs is None
    ):
        # In blocks of 128 columnwise data is transposed.
        arguments = {
            "transpose" if turned and name == "columnwise_data" else name: each for name, each in given.items()
        }
        launch(quantize_block_kernel if turned else quantize_mxfp8_kernel, grid, **arguments, **constants)
    return list(buffers.values())


def mxfp8_launches(
    form: MXFP8Form,
    size: tuple[Size, Size],
    itemsize: int,
    packed: bool,
    tile: Tile | None,
    as_it_lies: bool = True,
    columns_of_one: int | None = None,
) -> Iterator[tuple[bool, tuple[Size, ...], dict[str, Any]]]:
    """(whether it is one of the kernel of whole blocks of 128, the grid, the constants) of each launch on [M, K].

    as_it_lies: not in a padded order. columns_of_one: whole tiles, of each tensor where several lie side by side.
    """
    rows, columns = size
    for usage in form.launches(itemsize):
        by_blocks = form.turns and (usage["COLUMNWISE"] or form.two_d)
        if by_blocks:
            _, group, warps = tile or tile_128(packed)
            grid, constants = block_launch(size, (128, warps, group), packed, as_it_lies)
            scaling = f"e8m0{' 128x128' * form.two_d}{' swizzled' * form.swizzled}"
            scales = {"SCALING": scaling, "EPS": 0.0, "POWER_OF_TWO": True, "LARGEST": 0.0}
        else:
            by_rows = row_tile(columns_of_one or columns, packed, form.swizzled)
            block_m, block_k, warps = tile or (tile_32(columns) if usage["COLUMNWISE"] or form.two_d else by_rows)
            group = group_of_rows(rows, 128)
            grid = (round_up(columns, 128) // block_k, 128 // block_m * group, blocks_of(rows, 128 * group))
            whole = as_it_lies and whole_tiles(rows, columns, 128)
            constants = {"BLOCK_M": block_m, "BLOCK_K": block_k, "PACKED": packed, "WHOLE": whole, "num_warps": warps}
            scales = {"SCALE_BLOCK": form.scale_block, "TWO_D": form.two_d, "SWIZZLED": form.swizzled, "GROUP_M": group}
        yield by_blocks, grid, {**form.constants(), **scales, **usage, **constants}


def dequantize_mxfp8(
    data: torch.Tensor, scale_inv: torch.Tensor, columnwise: bool, dtype: torch.dtype, tile: Tile = (32, 128, 4)
) -> torch.Tensor:
    """The values [R, C] of data [R, C] on a CUDA device, in `dtype`, each rounded once; R may be symbolic.

    columnwise: scale_inv is (ceil(R/32)^4, C^128), of blocks of 32 along columns; otherwise (R^128, ceil(C/32)^4), of blocks along
    rows, which is also the form of columnwise buffers of blocks of 128: their values are those of x^T. bfloat16 holds every
    value exactly that is neither below 2^-133 nor beyond 2^128.
    """
    rows, columns = data.shape
    scale_inv = _in_order(scale_inv, columnwise)
    values = torch.empty((rows, columns), dtype=dtype, device=data.device)
    if isinstance(rows, int) and rows * columns == 0:
        return values
    block_m, block_k, warps = tile
    launch(
        dequantize_mxfp8_kernel,
        (triton.cdiv(rows, block_m) * triton.cdiv(columns, block_k),),
        data=data,
        scale_inv=scale_inv,
        values=values,
        M=rows,
        K=columns,
        COLUMNWISE=columnwise,
        BLOCK_M=block_m,
        BLOCK_K=block_k,
        num_warps=warps,
    )
    return values


# --- tile choice --------------------------------------------------------------------------------------------


Tile = tuple[int, int, int]
"""(rows, columns, warps); rows divide 128, columns the tensor's, rounded up to 128. Of blocks of 128 along columns: (128, rows of
tiles walked together, warps)."""


def tile_128(packed: bool) -> Tile:
    """The fastest tile on an H200 for blocks of 128 along columns. Values that are not packed need twice the registers."""
    return (128, 4, 4) if packed else (128, 8, 8)


def row_tile(columns: Size, packed: bool, swizzled: bool = False) -> Tile:
    """Without columnwise data: packed, as wide as fills whole sectors with the codes of a row; swizzled, they lie apart."""
    if not packed:
        return tile_32(columns) if isinstance(columns, int) and columns % 16 else (64, 128, 4)
    wide = isinstance(columns, int) and not swizzled
    block_k = math.gcd(round_up(columns, 128), 1024) if wide else 128
    return 8192 // block_k, block_k, 4


def tile_32(columns: Size) -> Tile:
    """The fastest tile on an H200 for blocks of 32 with columnwise data, at 8192x4096 (benchmarks/quantize.py --sweep).

    Where rows of x are not whole vectors, a thread has an address for every element, and so fewer of them.
    """
    return (32, 128, 8) if isinstance(columns, int) and columns % 16 else (32, 128, 2)
