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

from te_dynamo.kernels.layouts import block
from te_dynamo.kernels.layouts.block import BLOCK
from te_dynamo.kernels.layouts.sizes import allocate, blocks_of, rows_and_columns, transposed
from te_dynamo.kernels.quantize.current import cast_reference, scale_reference
from te_dynamo.kernels.runtime._triton import tl, triton
from te_dynamo.kernels.runtime.launch import launch
from te_dynamo.kernels.runtime.writes import writes
from te_dynamo.kernels.tiles.block_words import (
    all_bits,
    both_halves,
    cast_rows,
    column_pair_amax,
    exponents,
    larger_halves,
    load_words,
    packs,
    row_pair_amax,
    store_codes,
    store_column_codes,
    store_row_codes,
    store_turned,
    turned,
    whole_tiles,
)
from te_dynamo.kernels.tiles.blocks import (
    column_amax,
    grouped_grid,
    grouped_tile,
    interleave,
    load_quarters,
    row_amax,
    store_columns,
    store_quarter,
)
from te_dynamo.kernels.tiles.fp8 import cast_launches, scale_from_amax, zero_padded

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
    rows, columns = rows_and_columns(x.shape)
    matrix = x.reshape(rows, columns)
    buffers: list[torch.Tensor] = []
    if rowwise:
        buffers += _rowwise_reference(matrix, fp8_dtype, two_d, power_of_two, eps)
    if columnwise:
        data, scale_inv = _rowwise_reference(matrix.t(), fp8_dtype, two_d, power_of_two, eps)
        buffers += [zero_padded(data, *transposed(rows, columns)), scale_inv]
    return buffers


def _rowwise_reference(
    x: torch.Tensor, fp8_dtype: torch.dtype, two_d: bool, power_of_two: bool, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """data and scale_inv of x [M, K]."""
    rows, columns = x.shape
    tile_rows = BLOCK if two_d else 1
    tiles_m, tiles_k = blocks_of(rows, tile_rows), blocks_of(columns, BLOCK)
    tiles = zero_padded(x, tiles_m * tile_rows, tiles_k * BLOCK).view(tiles_m, tile_rows, tiles_k, BLOCK)
    amax = tiles.abs().amax(dim=(1, 3)).to(torch.float32)
    scale = scale_reference(amax, fp8_dtype, power_of_two, eps, torch.finfo(x.dtype).max)
    value = (tiles.to(torch.float32) * scale[:, None, :, None]).view(tiles_m * tile_rows, tiles_k * BLOCK)
    grid = 1.0 / scale if two_d else (1.0 / scale).t()
    return cast_reference(value[:rows, :columns], fp8_dtype), zero_padded(
        grid, *block.scale_shape(rows, columns, two_d)
    )


# --- kernel -------------------------------------------------------------------------------------------------


@triton.jit
def block_scale(bits, FMAX: tl.constexpr, EPS: tl.constexpr, POWER_OF_TWO: tl.constexpr, LARGEST: tl.constexpr):
    """(scale, scale_inv) of blocks from the fp32 bit patterns of their amaxes."""
    if POWER_OF_TWO:
        # Exponents alone, no division. fmax is 1.75 * 2^8 or 1.75 * 2^15, so fmax / amax, rounded down to a power of two,
        # is 2^(8 - e) for an amax of m * 2^e with m <= 1.75, half of that above: the addition carries exactly there. No
        # scale is above 2^127, the power of two in the largest bf16 and fp32; any amax below 2^-119 has reached that.
        exponent: tl.constexpr = 8 if FMAX == 448.0 else 15
        bits = tl.maximum(bits, tl.full((), EPS, tl.float32).to(tl.int32, bitcast=True))
        above = tl.maximum(((bits + 0x1FFFFF) & 0x7F800000) - (exponent << 23), 0)
        power = tl.where((bits > 0) & (bits < 0x7F800000), 0x7F000000 - above, 0x3F800000)
        scale = power.to(tl.float32, bitcast=True)
        # 2^-127, the inverse of 2^127, is subnormal.
        inverse = tl.where(power == 0x7F000000, 0x00400000, 0x7F000000 - power).to(tl.float32, bitcast=True)
    else:
        scale = scale_from_amax(bits.to(tl.float32, bitcast=True), FMAX, EPS, False, LARGEST)
        inverse = tl.div_rn(tl.full((), 1.0, tl.float32), scale)
    return scale, inverse


@writes(data="ROWWISE", scale_inv="ROWWISE", transpose="COLUMNWISE", columnwise_scale_inv="COLUMNWISE")
@triton.jit
def quantize_block_kernel(
    x,
    data,
    scale_inv,
    transpose,
    columnwise_scale_inv,
    M,
    K,
    FMAX: tl.constexpr,
    EPS: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    LARGEST: tl.constexpr,
    TWO_D: tl.constexpr,
    ROWWISE: tl.constexpr,
    COLUMNWISE: tl.constexpr,
    ROWS: tl.constexpr,
    GROUP_M: tl.constexpr,
    PACKED: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """One tile of x a program: amaxes, scales, casts and stores. ROWS is 128 where blocks span as many rows."""
    row, column = grouped_tile(ROWS, GROUP_M)
    if row >= M:
        return
    if PACKED:
        quantize_block_words(
            x,
            data,
            scale_inv,
            transpose,
            columnwise_scale_inv,
            row,
            column,
            M,
            M,
            K,
            FMAX,
            EPS,
            TWO_D,
            ROWWISE,
            COLUMNWISE,
            ROWS,
            WHOLE,
        )
    else:
        quantize_block_elements(
            x,
            data,
            scale_inv,
            transpose,
            columnwise_scale_inv,
            row,
            column,
            M,
            M,
            K,
            FMAX,
            EPS,
            POWER_OF_TWO,
            LARGEST,
            TWO_D,
            ROWWISE,
            COLUMNWISE,
            ROWS,
        )


@triton.jit
def word_scales(amaxes, FMAX: tl.constexpr, EPS: tl.constexpr):
    """(scales, inverses) of `block_scale` with powers of two, in bf16, two in a word as their amaxes are."""
    above = exponents(amaxes, FMAX)
    special = amaxes + 0x00800080  # the highest bit of infinities and NaN
    if EPS > 0:
        least = tl.full((), EPS, tl.float32).to(tl.int32, bitcast=True)
        exponent: tl.constexpr = 8 if FMAX == 448.0 else 15
        least = tl.maximum(((least + 0x1FFFFF) & 0x7F800000) - (exponent << 23), 0)
        above = larger_halves(above, (least >> 16) | least)
    else:
        special |= tl.full((), -0x7FFF8000, tl.int32) - amaxes  # and of zeros
    one = all_bits(special)
    scales = ((0x7F007F00 - above) & ~one) | (0x3F803F80 & one)
    # 2^-127, the inverse of 2^127, is subnormal.
    inverses = larger_halves(above, tl.full((), 0x00400040, tl.int32))
    return scales, (inverses & ~one) | (0x3F803F80 & one)


@triton.jit
def low_value(words):
    """The low halves, bf16, as fp32."""
    return (words << 16).to(tl.float32, bitcast=True)


@triton.jit
def high_value(words):
    """The high halves, bf16, as fp32."""
    return (words & -0x10000).to(tl.float32, bitcast=True)


@triton.jit
def quantize_block_words(
    x,
    data,
    scale_inv,
    transpose,
    columnwise_scale_inv,
    row,
    column,
    last,
    M,
    K,
    FMAX: tl.constexpr,
    EPS: tl.constexpr,
    TWO_D: tl.constexpr,
    ROWWISE: tl.constexpr,
    COLUMNWISE: tl.constexpr,
    ROWS: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """The tile at (row, column) of bf16 x, scales powers of two: kernels/tiles/block_words.py. x ends before row `last`."""
    DTYPE: tl.constexpr = data.dtype.element_ty if ROWWISE else transpose.dtype.element_ty
    x0 = load_words(x, row, column, last, K, 0, ROWS, WHOLE)
    x1 = load_words(x, row, column, last, K, 1, ROWS, WHOLE)
    x2 = load_words(x, row, column, last, K, 2, ROWS, WHOLE)
    x3 = load_words(x, row, column, last, K, 3, ROWS, WHOLE)
    if TWO_D:
        amax = both_halves(tl.reduce(column_pair_amax(x0, x1, x2, x3), 0, larger_halves))
        scale, inverse = word_scales(amax, FMAX, EPS)
        if ROWWISE:
            store_scale_2d(scale_inv, low_value(inverse), row, column, K)
        if COLUMNWISE:
            store_scale_2d(columnwise_scale_inv, low_value(inverse), column, row, M)
        c0 = cast_rows(x0, scale, DTYPE)
        c1 = cast_rows(x1, scale, DTYPE)
        c2 = cast_rows(x2, scale, DTYPE)
        c3 = cast_rows(x3, scale, DTYPE)
        if ROWWISE:
            store_codes(data, c0, row, column, M, K, 0, ROWS, WHOLE)
            store_codes(data, c1, row, column, M, K, 1, ROWS, WHOLE)
            store_codes(data, c2, row, column, M, K, 2, ROWS, WHOLE)
            store_codes(data, c3, row, column, M, K, 3, ROWS, WHOLE)
        if COLUMNWISE:
            left, right = turned(c0, c1, c2, c3)
            store_turned(transpose, left, right, row, column, M, K, ROWS, WHOLE)
    else:
        # Every scale before the first cast: fewer registers than in any other order.
        if ROWWISE:
            upper, upper_inverse = word_scales(row_pair_amax(x0, x1, ROWS), FMAX, EPS)
            lower, lower_inverse = word_scales(row_pair_amax(x2, x3, ROWS), FMAX, EPS)
            inverse = interleave(
                low_value(upper_inverse),
                high_value(upper_inverse),
                low_value(lower_inverse),
                high_value(lower_inverse),
                ROWS,
            )
            store_scales_1d(scale_inv, inverse, column, row, M, ROWS, WHOLE)
        if COLUMNWISE:
            columns, inverse = word_scales(column_pair_amax(x0, x1, x2, x3), FMAX, EPS)
            inverse = tl.reshape(tl.join(low_value(inverse), high_value(inverse)), (128,))
            store_scales_1d(columnwise_scale_inv, inverse, row, column, K, 128, WHOLE)
        if ROWWISE:
            store_row_codes(data, x0, x1, x2, x3, upper, lower, row, column, M, K, ROWS, WHOLE)
        if COLUMNWISE:
            store_column_codes(transpose, x0, x1, x2, x3, columns, row, column, M, K, ROWS, WHOLE)


@triton.jit
def quantize_block_elements(
    x,
    data,
    scale_inv,
    transpose,
    columnwise_scale_inv,
    row,
    column,
    last,
    M,
    K,
    FMAX: tl.constexpr,
    EPS: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    LARGEST: tl.constexpr,
    TWO_D: tl.constexpr,
    ROWWISE: tl.constexpr,
    COLUMNWISE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """The tile at (row, column) of x of any dtype, with scales of any kind: kernels/tiles/blocks.py. x ends before row `last`."""
    x0, x1, x2, x3 = load_quarters(x, row, column, last, K, ROWS)
    if TWO_D:
        bits = tl.max(column_amax(x0, x1, x2, x3), axis=0)
        scale, inverse = block_scale(bits, FMAX, EPS, POWER_OF_TWO, LARGEST)
        if ROWWISE:
            store_scale_2d(scale_inv, inverse, row, column, K)
            store_quarter(data, x0, scale, row, column, M, K, 0, ROWS)
            store_quarter(data, x1, scale, row, column, M, K, 1, ROWS)
            store_quarter(data, x2, scale, row, column, M, K, 2, ROWS)
            store_quarter(data, x3, scale, row, column, M, K, 3, ROWS)
        if COLUMNWISE:
            store_scale_2d(columnwise_scale_inv, inverse, column, row, M)
            store_columns(transpose, x0, x1, x2, x3, scale, row, column, M, K, ROWS)
    else:
        # Every scale before the first cast: fewer registers than in any other order.
        if ROWWISE:
            scale_0, inverse_0 = block_scale(row_amax(x0), FMAX, EPS, POWER_OF_TWO, LARGEST)
            scale_1, inverse_1 = block_scale(row_amax(x1), FMAX, EPS, POWER_OF_TWO, LARGEST)
            scale_2, inverse_2 = block_scale(row_amax(x2), FMAX, EPS, POWER_OF_TWO, LARGEST)
            scale_3, inverse_3 = block_scale(row_amax(x3), FMAX, EPS, POWER_OF_TWO, LARGEST)
            inverse = interleave(inverse_0, inverse_1, inverse_2, inverse_3, ROWS)
            store_scales_1d(scale_inv, inverse, column, row, M, ROWS, False)
        if COLUMNWISE:
            bits = column_amax(x0, x1, x2, x3)
            columnwise_scale, columnwise_inverse = block_scale(bits, FMAX, EPS, POWER_OF_TWO, LARGEST)
            store_scales_1d(columnwise_scale_inv, columnwise_inverse, row, column, K, 128, False)
        if ROWWISE:
            store_quarter(data, x0, scale_0[:, None], row, column, M, K, 0, ROWS)
            store_quarter(data, x1, scale_1[:, None], row, column, M, K, 1, ROWS)
            store_quarter(data, x2, scale_2[:, None], row, column, M, K, 2, ROWS)
            store_quarter(data, x3, scale_3[:, None], row, column, M, K, 3, ROWS)
        if COLUMNWISE:
            store_columns(transpose, x0, x1, x2, x3, columnwise_scale[None, :], row, column, M, K, ROWS)


@triton.jit
def store_scales_1d(scale_inv, inverse, k, m, SIZE, COUNT: tl.constexpr, WHOLE: tl.constexpr):
    """inverse [COUNT] to scale_inv[k / 128, m : m + COUNT], rows of SIZE rounded up to 4, zeros past SIZE."""
    stride = (SIZE + 3) // 4 * 4
    index = m + tl.arange(0, COUNT)
    places = (scale_inv + tl.cast(k // 128, tl.int64) * stride) + index
    if WHOLE:
        tl.store(places, inverse)
    else:
        tl.store(places, tl.where(index < SIZE, inverse, 0.0), mask=index < stride)


@triton.jit
def store_scale_2d(scale_inv, inverse, m, k, SIZE):
    """inverse to scale_inv[m / 128, k / 128], rows of ceil(SIZE / 128) rounded up to 4; the last block adds the zeros."""
    stride = (SIZE + 511) // 512 * 4
    ahead = tl.arange(0, 4)
    index = k // 128 + ahead
    last = k + 128 >= SIZE
    mask = (ahead == 0) | (last & (index < stride))
    tl.store(scale_inv + (m // 128) * stride + index, tl.where(ahead == 0, inverse, 0.0), mask=mask)


# --- launcher -----------------------------------------------------------------------------------------------


BlockTile = tuple[int, int, int]
"""(rows of a tile, warps, rows of tiles walked together); a tile has 128 columns."""


def quantize_block(
    x: torch.Tensor,
    fp8_dtype: torch.dtype,
    rowwise: bool,
    columnwise: bool,
    two_d: bool,
    power_of_two: bool,
    eps: float,
    tile: BlockTile | None = None,
) -> list[torch.Tensor]:
    """[data, scale_inv] if rowwise, + [transpose, columnwise_scale_inv] if columnwise, of x of any rank >= 1.

    x [M, K] is bfloat16, float16 or float32; blocks are 128x128 if two_d, 1x128 otherwise (module docstring). One
    launch that reads x once, for fp32 with both usages two. `tile` overrides `block_tile`.
    """
    x = x.contiguous()
    rows, columns = rows_and_columns(x.shape)
    buffers = allocate(block.buffers(rows, columns, fp8_dtype, rowwise, columnwise, two_d), x.device)
    if isinstance(rows, int) and rows * columns == 0:
        return list(buffers.values())
    packed = power_of_two and packs(x)
    tile_rows, warps, group = tile or block_tile(columnwise, two_d, packed)
    for by_rows, by_columns in cast_launches(rowwise, columnwise, x.element_size()):
        launch(
            quantize_block_kernel,
            grouped_grid(rows, columns, tile_rows, group),
            x=x,
            M=rows,
            K=columns,
            **dict.fromkeys(block.BUFFERS, x) | buffers,
            FMAX=torch.finfo(fp8_dtype).max,
            EPS=float(eps),
            POWER_OF_TWO=power_of_two,
            LARGEST=torch.finfo(x.dtype).max,
            TWO_D=two_d,
            ROWWISE=by_rows,
            COLUMNWISE=by_columns,
            ROWS=tile_rows,
            GROUP_M=group,
            PACKED=packed,
            WHOLE=whole_tiles(rows, columns, tile_rows),
            num_warps=warps,
        )
    return list(buffers.values())


def block_tile(columnwise: bool, two_d: bool, packed: bool) -> BlockTile:
    """Rows, warps and group of a launch, the fastest on an H200 at 8192x4096 (benchmarks/quantize.py --sweep). With 4 warps a
    whole tile leaves registers for several programs a multiprocessor: one loads while another computes. Values that are not
    packed need twice the registers."""
    if columnwise or two_d:
        return (128, 4, 4) if packed else (128, 8, 8)
    return 64, 4, 1
