"""The kernel of kernels/quantize/float8_block.py and of mxfp8.py's blocks of 128 by columns, and a tile of it for whoever has scales of 128 values.

SCALING says what scales are, and where they lie: "1x128" and "128x128" as that file's table has them; "e8m0" as that of
kernels/quantize/mxfp8.py has those of blocks of 128, "e8m0 128x128" as of blocks of 128x128, either with " swizzled" behind. A tile is a tuple `place`: (first row, first column, M, K). `buffers`: (data, its scales, transposed data, its scales).
"""

from __future__ import annotations

from te_dynamo.kernels.layouts.tiled_scales import scale_offsets
from te_dynamo.kernels.runtime._triton import tl, triton
from te_dynamo.kernels.runtime.writes import writes
from te_dynamo.kernels.tiles.block_words import (
    all_bits,
    both_halves,
    cast_rows,
    column_pair_amax,
    exponents,
    high_value,
    larger_halves,
    load_quarter_words,
    low_value,
    row_pair_amax,
    store_codes,
    store_column_codes,
    store_row_codes,
    store_turned,
    turned,
)
from te_dynamo.kernels.tiles.blocks import (
    column_amax,
    grouped_tile,
    interleave,
    load_quarters,
    row_amax,
    store_columns,
    store_quarter,
)
from te_dynamo.kernels.tiles.fp8 import scale_from_amax
from te_dynamo.kernels.tiles.groups import in_padded_order

# --- scales of amaxes ---------------------------------------------------------------------------------------


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
def code_and_multiplier(amax_bits, FMAX: tl.constexpr):
    """The code (int32) of blocks whose amaxes have these bit patterns, and 2^(127 - code), as in the reference."""
    INVERSE: tl.constexpr = 1.0 / FMAX
    bits = (amax_bits.to(tl.float32, bitcast=True) * INVERSE).to(tl.int32, bitcast=True)
    # As unsigned, 255 comes from infinity and 256 from NaN: one more than the codes.
    code = ((bits.to(tl.uint32, bitcast=True) + 0x7FFFFF) >> 23).to(tl.int32)
    beyond = code > 254
    code = tl.where(bits <= 0x00400000, 0, tl.where(beyond, code - 1, code))
    # The bit makes 2^-127 of the zero that code 254 gives, and NaN of the infinity that code 255 gives.
    multiplier = ((254 - code) << 23) | tl.where(beyond, 0x00400000, 0)
    return code, multiplier.to(tl.float32, bitcast=True)


@triton.jit
def word_codes(amaxes, FMAX: tl.constexpr):
    """(codes, multipliers in bf16) of `code_and_multiplier`, two in a word as their amaxes are."""
    above = exponents(amaxes, FMAX)
    special = all_bits(amaxes + 0x00800080)  # infinities and NaN
    nan = all_bits(amaxes + 0x007F007F)
    codes = ((above >> 7) & ~special) | ((0x00FE00FE | (nan & 0x00010001)) & special)
    # 2^-127 for the infinite: subnormal.
    multipliers = ((0x7F007F00 - above) & ~special) | ((0x00400040 | (nan & 0x7F807F80)) & special)
    return codes, multipliers


@triton.jit
def element_scales(bits, FORM: tl.constexpr):
    """(scales, what is stored of them) of blocks from the fp32 bit patterns of their amaxes. FORM: `quantize_block_tile`'s."""
    SCALING: tl.constexpr = FORM[0]
    FMAX: tl.constexpr = FORM[1]
    EPS: tl.constexpr = FORM[2]
    POWER_OF_TWO: tl.constexpr = FORM[3]
    LARGEST: tl.constexpr = FORM[4]
    if SCALING == "1x128" or SCALING == "128x128":
        scale, stored = block_scale(bits, FMAX, EPS, POWER_OF_TWO, LARGEST)
    else:
        stored, scale = code_and_multiplier(bits, FMAX)
    return scale, stored


@triton.jit
def pair_scales(amaxes, SCALING: tl.constexpr, FMAX: tl.constexpr, EPS: tl.constexpr):
    """The same of two amaxes a word: (scales in bf16, what is stored), two in a word."""
    if SCALING == "1x128" or SCALING == "128x128":
        scales, stored = word_scales(amaxes, FMAX, EPS)
    else:
        stored, scales = word_codes(amaxes, FMAX)
    return scales, stored


@triton.jit
def stored_pair(words, SCALING: tl.constexpr):
    """What is stored of the low halves, and of the high ones."""
    if SCALING == "1x128" or SCALING == "128x128":
        low, high = low_value(words), high_value(words)
    else:
        low, high = words & 0xFF, words >> 16
    return low, high


# --- where scales lie ---------------------------------------------------------------------------------------


@triton.jit
def store_scale_2d(scale_inv, inverse, m, k, SIZE):
    """inverse to scale_inv[m / 128, k / 128], rows of ceil(SIZE / 128) rounded up to 4; the last block adds the zeros."""
    stride = (SIZE + 511) // 512 * 4
    ahead = tl.arange(0, 4)
    index = k // 128 + ahead
    last = k + 128 >= SIZE
    mask = (ahead == 0) | (last & (index < stride))
    tl.store(scale_inv + (m // 128) * stride + index, tl.where(ahead == 0, inverse, 0.0), mask=mask)


@triton.jit
def four_times(code, first, BLOCKS):
    """Words of each code four times, of the blocks of 32 from `first` on: zero past the last of BLOCKS."""
    missing = tl.maximum(first + 4 - BLOCKS, 0)
    return code * (0x01010101 >> (missing * 8))


@triton.jit
def store_scales(scale_inv, stored, i, k, LINES, SIZE, SCALING: tl.constexpr, COUNT: tl.constexpr, WHOLE: tl.constexpr):
    """stored [COUNT] of the blocks from element k on of COUNT lines, from line i on, of LINES lines of SIZE elements.

    1x128: scale_inv[k / 128, i : i + COUNT], rows of LINES rounded up to 4, zeros past LINES. Codes: COUNT is 128, each four times as
    a word, zero past the last block of 32. Plain, each word is an eighth of a sector. Those stay in the cache until the tiles beside it
    have written the rest: a part that leaves alone costs the memory a whole sector, read and written.
    """
    if SCALING == "1x128":
        stride = (LINES + 3) // 4 * 4
        index = i + tl.arange(0, COUNT)
        places = (scale_inv + tl.cast(k // 128, tl.int64) * stride) + index
        if WHOLE:
            tl.store(places, stored)
        else:
            tl.store(places, tl.where(index < LINES, stored, 0.0), mask=index < stride)
    else:
        first, blocks = k // 32, tl.cdiv(SIZE, 32)
        SWIZZLED: tl.constexpr = SCALING == "e8m0 swizzled" or SCALING == "e8m0 128x128 swizzled"
        places = scale_offsets(i + tl.arange(0, 128), first, tl.cdiv(blocks, 4) * 4, SWIZZLED) // 4
        words = four_times(stored, first, blocks)
        tl.store(scale_inv.to(tl.pointer_type(tl.int32), bitcast=True) + places, words, eviction_policy="evict_last")


@triton.jit
def store_square_scale(scale_inv, stored, m, k, LINES, SIZE, SCALING: tl.constexpr):
    """What is stored of the 128x128 block from (m, k) on of LINES lines of SIZE elements; of codes once for each line, zero past LINES."""
    if SCALING == "128x128":
        store_scale_2d(scale_inv, stored, m, k, SIZE)
    else:
        each = tl.where(m + tl.arange(0, 128) < LINES, stored, 0)
        store_scales(scale_inv, each, m, k, LINES, SIZE, SCALING, 128, False)


# --- a tile -------------------------------------------------------------------------------------------------


@triton.jit
def quantize_block_tile(quarters, buffers, place, FORM: tl.constexpr, PACKED: tl.constexpr, WHOLE: tl.constexpr):
    """Amaxes, scales, casts and stores of one tile, given as four quarters.

    FORM: (SCALING, FMAX, EPS, POWER_OF_TWO, LARGEST, ROWWISE, COLUMNWISE, ROWS); ROWS is 128 where blocks span as many rows.
    """
    if PACKED:
        quantize_words(quarters, buffers, place, FORM, WHOLE)
    else:
        quantize_elements(quarters, buffers, place, FORM)


@triton.jit
def quantize_words(quarters, buffers, place, FORM: tl.constexpr, WHOLE: tl.constexpr):
    """A tile of bf16 x, scales powers of two: kernels/tiles/block_words.py."""
    SCALING: tl.constexpr = FORM[0]
    FMAX: tl.constexpr = FORM[1]
    EPS: tl.constexpr = FORM[2]
    ROWWISE: tl.constexpr = FORM[5]
    COLUMNWISE: tl.constexpr = FORM[6]
    ROWS: tl.constexpr = FORM[7]
    data, scale_inv, transpose, columnwise_scale_inv = buffers
    row, column, M, K = place
    DTYPE: tl.constexpr = data.dtype.element_ty if ROWWISE else transpose.dtype.element_ty
    x0, x1, x2, x3 = quarters
    if SCALING == "128x128" or SCALING == "e8m0 128x128" or SCALING == "e8m0 128x128 swizzled":
        amax = both_halves(tl.reduce(column_pair_amax(x0, x1, x2, x3), 0, larger_halves))
        scale, stored = pair_scales(amax, SCALING, FMAX, EPS)
        stored, _ = stored_pair(stored, SCALING)
        if ROWWISE:
            store_square_scale(scale_inv, stored, row, column, M, K, SCALING)
        if COLUMNWISE:
            store_square_scale(columnwise_scale_inv, stored, column, row, K, M, SCALING)
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
            upper, upper_stored = pair_scales(row_pair_amax(x0, x1, ROWS), SCALING, FMAX, EPS)
            lower, lower_stored = pair_scales(row_pair_amax(x2, x3, ROWS), SCALING, FMAX, EPS)
            stored = interleave(*stored_pair(upper_stored, SCALING), *stored_pair(lower_stored, SCALING), ROWS)
            store_scales(scale_inv, stored, row, column, M, K, SCALING, ROWS, WHOLE)
        if COLUMNWISE:
            columns, stored = pair_scales(column_pair_amax(x0, x1, x2, x3), SCALING, FMAX, EPS)
            stored = tl.reshape(tl.join(*stored_pair(stored, SCALING)), (128,))
            store_scales(columnwise_scale_inv, stored, column, row, K, M, SCALING, 128, WHOLE)
        if ROWWISE:
            store_row_codes(data, x0, x1, x2, x3, upper, lower, row, column, M, K, ROWS, WHOLE)
        if COLUMNWISE:
            store_column_codes(transpose, x0, x1, x2, x3, columns, row, column, M, K, ROWS, WHOLE)


@triton.jit
def quantize_elements(quarters, buffers, place, FORM: tl.constexpr):
    """A tile of x of any dtype, with scales of any kind: kernels/tiles/blocks.py."""
    SCALING: tl.constexpr = FORM[0]
    ROWWISE: tl.constexpr = FORM[5]
    COLUMNWISE: tl.constexpr = FORM[6]
    ROWS: tl.constexpr = FORM[7]
    data, scale_inv, transpose, columnwise_scale_inv = buffers
    row, column, M, K = place
    x0, x1, x2, x3 = quarters
    if SCALING == "128x128" or SCALING == "e8m0 128x128" or SCALING == "e8m0 128x128 swizzled":
        scale, stored = element_scales(tl.max(column_amax(x0, x1, x2, x3), axis=0), FORM)
        if ROWWISE:
            store_square_scale(scale_inv, stored, row, column, M, K, SCALING)
            store_quarters(data, (x0, x1, x2, x3), (scale, scale, scale, scale), row, column, M, K, ROWS)
        if COLUMNWISE:
            store_square_scale(columnwise_scale_inv, stored, column, row, K, M, SCALING)
            store_columns(transpose, x0, x1, x2, x3, scale, row, column, M, K, ROWS)
    else:
        # Every scale before the first cast, codes of the rows after theirs: fewer registers than in any other order.
        if ROWWISE:
            scale_0, stored_0 = element_scales(row_amax(x0), FORM)
            scale_1, stored_1 = element_scales(row_amax(x1), FORM)
            scale_2, stored_2 = element_scales(row_amax(x2), FORM)
            scale_3, stored_3 = element_scales(row_amax(x3), FORM)
            stored = interleave(stored_0, stored_1, stored_2, stored_3, ROWS)
            if SCALING == "1x128":
                store_scales(scale_inv, stored, row, column, M, K, SCALING, ROWS, False)
        if COLUMNWISE:
            column_scale, column_stored = element_scales(column_amax(x0, x1, x2, x3), FORM)
            store_scales(columnwise_scale_inv, column_stored, column, row, K, M, SCALING, 128, False)
        if ROWWISE:
            scales = scale_0[:, None], scale_1[:, None], scale_2[:, None], scale_3[:, None]
            store_quarters(data, (x0, x1, x2, x3), scales, row, column, M, K, ROWS)
            if SCALING != "1x128":
                store_scales(scale_inv, stored, row, column, M, K, SCALING, ROWS, False)
        if COLUMNWISE:
            store_columns(transpose, x0, x1, x2, x3, column_scale[None, :], row, column, M, K, ROWS)


@triton.jit
def store_quarters(data, quarters, scales, row, column, M, K, ROWS: tl.constexpr):
    """Writes cast(x * scale) of each quarter to data [M, K]."""
    store_quarter(data, quarters[0], scales[0], row, column, M, K, 0, ROWS)
    store_quarter(data, quarters[1], scales[1], row, column, M, K, 1, ROWS)
    store_quarter(data, quarters[2], scales[2], row, column, M, K, 2, ROWS)
    store_quarter(data, quarters[3], scales[3], row, column, M, K, 3, ROWS)


# --- kernel -------------------------------------------------------------------------------------------------


@writes(data="ROWWISE", scale_inv="ROWWISE", transpose="COLUMNWISE", columnwise_scale_inv="COLUMNWISE")
@triton.jit
def quantize_block_kernel(
    x,
    offs,
    data,
    scale_inv,
    transpose,
    columnwise_scale_inv,
    x_rows,
    M,
    K,
    G,
    GROUPS: tl.constexpr,
    FMAX: tl.constexpr,
    EPS: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    LARGEST: tl.constexpr,
    SCALING: tl.constexpr,
    ROWWISE: tl.constexpr,
    COLUMNWISE: tl.constexpr,
    ROWS: tl.constexpr,
    GROUP_M: tl.constexpr,
    PACKED: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """One tile a program of x [M, K], or of the padded order, M rows, of x [x_rows, K] in G groups that end at offs: GROUPS is G
    rounded up to a power of two, or 0."""
    row, column = grouped_tile(ROWS, GROUP_M)
    if row >= M:
        return
    x, last = in_padded_order(x, row, offs, x_rows, M, K, G, GROUPS)
    if PACKED:
        quarters = load_quarter_words(x, row, column, last, K, ROWS, WHOLE)
    else:
        quarters = load_quarters(x, row, column, last, K, ROWS)
    FORM: tl.constexpr = (SCALING, FMAX, EPS, POWER_OF_TWO, LARGEST, ROWWISE, COLUMNWISE, ROWS)
    buffers = data, scale_inv, transpose, columnwise_scale_inv
    quantize_block_tile(quarters, buffers, (row, column, M, K), FORM, PACKED, WHOLE)
