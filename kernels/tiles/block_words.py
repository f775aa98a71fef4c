"""A tile of a bf16 [M, K] tensor held as 32-bit words and quantized with powers of two, by rows, by columns or by both.

The tile is four quarters as in kernels/tiles/blocks.py, [ROWS / 4, 64] words of two neighbours each, the left one in the low
half. Everything up to the cast works on both halves at once:

* amaxes are maxima of words without their signs, as unsigned halves;
* scales are exponents: bf16 holds every power of two that a scale may be, and two of them share a word too;
* x * scale is a product of bf16, exact unless it is subnormal, and then its code is the same zero as the exact product's
  (float8 rounds everything below 2^-17 to zero), so that the codes are those of the fp32 product.

Rows of x must be whole 16 bytes, so that words never cross them.
"""

from __future__ import annotations

import torch

from te_dynamo.kernels.layouts.sizes import Size
from te_dynamo.kernels.runtime._triton import tl, triton
from te_dynamo.kernels.runtime.target import target_of

COLUMNS: tl.constexpr = tl.constexpr(128)
WORDS: tl.constexpr = tl.constexpr(64)


# --- load ---------------------------------------------------------------------------------------------------


@triton.jit
def quarter_rows(J: tl.constexpr, ROWS: tl.constexpr):
    """[ROWS / 4]: the rows of quarter J."""
    return J + 4 * tl.arange(0, ROWS // 4)


@triton.jit
def places_of_words(row, column, rows, M, K, COUNT: tl.constexpr, stride=None):
    """Where COUNT words of each of the tile's `rows` lie in a tensor of [M, K / 2] words, whose rows are `stride` values apart: (offset of
    the tile's first, offsets of all from there, which of them lie inside)."""
    width = K // 8 * 4  # so that the compiler sees whole 16 bytes
    words_a_row = width if stride is None else stride // 8 * 4
    # Four words a thread everywhere, though codes could be stored eight a time: x would be loaded in pieces of half a sector.
    words = tl.max_contiguous(tl.arange(0, COUNT), 4)
    mask = (row + rows < M)[:, None] & (column // 2 + words < width)[None, :]
    return tl.cast(row, tl.int64) * words_a_row + column // 2, rows[:, None] * words_a_row + words[None, :], mask


@triton.jit
def load_words(x, row, column, rows, M, K, COUNT: tl.constexpr, WHOLE: tl.constexpr, stride=None):
    """COUNT words of each of the tile's `rows`, zero outside [M, K]; WHOLE says that M and K are whole tiles."""
    corner, offsets, mask = places_of_words(row, column, rows, M, K, COUNT, stride)
    words = (x.to(tl.pointer_type(tl.int32)) + corner) + offsets
    return tl.load(words) if WHOLE else tl.load(words, mask=mask, other=0)


@triton.jit
def load_quarter_words(x, row, column, M, K, ROWS: tl.constexpr, WHOLE: tl.constexpr):
    """The tile's four quarters."""
    return (
        load_words(x, row, column, quarter_rows(0, ROWS), M, K, WORDS, WHOLE),
        load_words(x, row, column, quarter_rows(1, ROWS), M, K, WORDS, WHOLE),
        load_words(x, row, column, quarter_rows(2, ROWS), M, K, WORDS, WHOLE),
        load_words(x, row, column, quarter_rows(3, ROWS), M, K, WORDS, WHOLE),
    )


@triton.jit
def low_value(words):
    """The low halves, bf16, as fp32."""
    return (words << 16).to(tl.float32, bitcast=True)


@triton.jit
def high_value(words):
    """The high halves, bf16, as fp32."""
    return (words & -0x10000).to(tl.float32, bitcast=True)


# --- amax ---------------------------------------------------------------------------------------------------


@triton.jit
def larger_halves(a, b):
    """The larger of each half, unsigned: magnitudes of bf16 order so, NaN above inf above the finite."""
    return tl.inline_asm_elementwise("max.u16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def magnitudes(words):
    return words & 0x7FFF7FFF


@triton.jit
def low_halves(a, b):
    """Words of the low halves of a and b."""
    return tl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $2, 0x5410;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def high_halves(a, b):
    """Words of the high halves of a and b."""
    return tl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $2, 0x7632;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def row_pair_amax(upper, lower, ROWS: tl.constexpr):
    """Words [ROWS / 4] of the amaxes of the rows of two quarters, those of `upper` in the low halves."""
    QUARTER: tl.constexpr = ROWS // 4
    # Four words of a thread first; then two rows share a word, and each step between threads serves both.
    upper = tl.reduce(tl.reshape(magnitudes(upper), (QUARTER, WORDS // 4, 4)), 2, larger_halves)
    lower = tl.reduce(tl.reshape(magnitudes(lower), (QUARTER, WORDS // 4, 4)), 2, larger_halves)
    return tl.reduce(larger_halves(low_halves(upper, lower), high_halves(upper, lower)), 1, larger_halves)


@triton.jit
def column_pair_amax(x0, x1, x2, x3):
    """Words [64] of the amaxes of the tile's columns."""
    upper = larger_halves(magnitudes(x0), magnitudes(x1))
    lower = larger_halves(magnitudes(x2), magnitudes(x3))
    return tl.reduce(larger_halves(upper, lower), 0, larger_halves)


@triton.jit
def both_halves(words):
    """The larger half of each word in both of its halves."""
    return larger_halves(low_halves(words, words), high_halves(words, words))


# --- scales -------------------------------------------------------------------------------------------------


@triton.jit
def exponents(amaxes, FMAX: tl.constexpr):
    """For each half, the exponent field of the smallest power of two not below amax / fmax, and not below 2^-127: of an
    amax of m * 2^e, that is 2^(e - 8) for e4m3 (fmax 1.75 * 2^8), 2^(e - 15) for e5m2 (1.75 * 2^15), and twice as much
    where m > 1.75: the addition carries exactly there."""
    LEAST: tl.constexpr = (8 if FMAX == 448.0 else 15) * 0x00800080
    return larger_halves((amaxes + 0x001F001F) & 0x7F807F80, tl.full((), LEAST, tl.int32)) - LEAST


@triton.jit
def all_bits(flags):
    """All bits of each half whose highest bit is set, none of the others."""
    return tl.inline_asm_elementwise(
        "prmt.b32 $0, $1, 0, 0xBB99;", "=r,r", [flags], dtype=tl.int32, is_pure=True, pack=1
    )


# --- cast ---------------------------------------------------------------------------------------------------


@triton.jit
def cast_rows(words, scales, DTYPE: tl.constexpr):
    """Codes of words * scales (bf16, half by half), two in each int16."""
    CVT: tl.constexpr = "cvt.rn.satfinite.e4m3x2.f32 " if tl.float8e4nv == DTYPE else "cvt.rn.satfinite.e5m2x2.f32 "
    ASM: tl.constexpr = (
        "{ .reg .b32 y, low, high; .reg .b16 c0, c1;"
        " mul.rn.bf16x2 y, $1, $3; shl.b32 low, y, 16; and.b32 high, y, 0xFFFF0000; " + CVT + "c0, high, low;"
        " mul.rn.bf16x2 y, $2, $4; shl.b32 low, y, 16; and.b32 high, y, 0xFFFF0000; " + CVT + "c1, high, low;"
        " mov.b32 $0, {c0, c1}; }"
    )
    scales = tl.broadcast_to(scales, words.shape)
    return tl.inline_asm_elementwise(ASM, "=r,r,r,r,r", [words, scales], dtype=tl.int16, is_pure=True, pack=2)


@triton.jit
def cast_columns(x0, x1, x2, x3, scales, DTYPE: tl.constexpr):
    """(left, right) columns' codes of the quarters' words * scales, those of four rows in an int32."""
    CVT: tl.constexpr = "cvt.rn.satfinite.e4m3x2.f32 " if tl.float8e4nv == DTYPE else "cvt.rn.satfinite.e5m2x2.f32 "
    ASM: tl.constexpr = (
        "{ .reg .b32 y0, y1, u0, u1; .reg .b16 l0, l1, r0, r1;"
        " mul.rn.bf16x2 y0, $2, $6; mul.rn.bf16x2 y1, $3, $6;"
        " shl.b32 u0, y0, 16; shl.b32 u1, y1, 16; " + CVT + "l0, u1, u0;"
        " and.b32 u0, y0, 0xFFFF0000; and.b32 u1, y1, 0xFFFF0000; " + CVT + "r0, u1, u0;"
        " mul.rn.bf16x2 y0, $4, $6; mul.rn.bf16x2 y1, $5, $6;"
        " shl.b32 u0, y0, 16; shl.b32 u1, y1, 16; " + CVT + "l1, u1, u0;"
        " and.b32 u0, y0, 0xFFFF0000; and.b32 u1, y1, 0xFFFF0000; " + CVT + "r1, u1, u0;"
        " mov.b32 $0, {l0, l1}; mov.b32 $1, {r0, r1}; }"
    )
    return tl.inline_asm_elementwise(
        ASM, "=r,=r,r,r,r,r,r", [x0, x1, x2, x3, scales], dtype=(tl.int32, tl.int32), is_pure=True, pack=1
    )


@triton.jit
def turned(c0, c1, c2, c3):
    """(left, right) columns' codes, those of four rows in an int32, from the quarters' codes by rows, two in an int16."""
    ASM: tl.constexpr = (
        "{ .reg .b32 upper, lower;"
        " prmt.b32 upper, $4, $5, 0x5140; prmt.b32 lower, $6, $7, 0x5140;"
        " prmt.b32 $0, upper, lower, 0x5410; prmt.b32 $2, upper, lower, 0x7632;"
        " prmt.b32 upper, $4, $5, 0x7362; prmt.b32 lower, $6, $7, 0x7362;"
        " prmt.b32 $1, upper, lower, 0x5410; prmt.b32 $3, upper, lower, 0x7632; }"
    )
    return tl.inline_asm_elementwise(
        ASM, "=&r,=&r,=&r,=&r,r,r,r,r", [c0, c1, c2, c3], dtype=(tl.int32, tl.int32), is_pure=True, pack=2
    )


# --- store --------------------------------------------------------------------------------------------------


@triton.jit
def store_codes(data, codes, row, column, M, K, J: tl.constexpr, ROWS: tl.constexpr, WHOLE: tl.constexpr):
    """Writes the codes of quarter J to data [M, K]."""
    corner, offsets, mask = places_of_words(row, column, quarter_rows(J, ROWS), M, K, WORDS)
    places = (data.to(tl.pointer_type(tl.int16)) + corner) + offsets
    if WHOLE:
        tl.store(places, codes)
    else:
        tl.store(places, codes, mask=mask)


@triton.jit
def store_turned(transpose, left, right, row, column, M, K, ROWS: tl.constexpr, WHOLE: tl.constexpr):
    """Writes columns' codes to transpose [K, M rounded up to 16], zeros past M."""
    codes = tl.reshape(tl.join(left, right), (ROWS // 4, COLUMNS))
    stride = (M + 15) // 16 * 4  # in words; computed here, so that the compiler sees a multiple of four
    columns, words = tl.arange(0, COLUMNS), tl.arange(0, ROWS // 4)
    corner = tl.cast(column, tl.int64) * stride + row // 4
    places = (transpose.to(tl.pointer_type(tl.int32)) + corner) + (columns[:, None] * stride + words[None, :])
    if WHOLE:
        tl.store(places, tl.trans(codes))
    else:
        # Zeros past M, which a NaN for a scale would have made NaN: bytes of the rows that are left, from the lowest.
        rows_left = M - row - 4 * words
        kept = tl.where(rows_left >= 4, -1, (1 << (8 * tl.minimum(tl.maximum(rows_left, 0), 3))) - 1)
        mask = (column + columns < K)[:, None] & (row // 4 + words < stride)[None, :]
        tl.store(places, tl.trans(codes & kept[:, None]), mask=mask)


@triton.jit
def store_row_codes(data, x0, x1, x2, x3, upper, lower, row, column, M, K, ROWS: tl.constexpr, WHOLE: tl.constexpr):
    """Writes the codes of the quarters times the scales of their rows, two in a word as `row_pair_amax` gives their amaxes."""
    DTYPE: tl.constexpr = data.dtype.element_ty
    c0 = cast_rows(x0, low_halves(upper, upper)[:, None], DTYPE)
    store_codes(data, c0, row, column, M, K, 0, ROWS, WHOLE)
    c1 = cast_rows(x1, high_halves(upper, upper)[:, None], DTYPE)
    store_codes(data, c1, row, column, M, K, 1, ROWS, WHOLE)
    c2 = cast_rows(x2, low_halves(lower, lower)[:, None], DTYPE)
    store_codes(data, c2, row, column, M, K, 2, ROWS, WHOLE)
    c3 = cast_rows(x3, high_halves(lower, lower)[:, None], DTYPE)
    store_codes(data, c3, row, column, M, K, 3, ROWS, WHOLE)


@triton.jit
def store_column_codes(transpose, x0, x1, x2, x3, scales, row, column, M, K, ROWS: tl.constexpr, WHOLE: tl.constexpr):
    """Writes the codes of the quarters times the columns' scales, words [64] as `column_pair_amax` gives the amaxes."""
    scales = tl.broadcast_to(scales[None, :], x0.shape)
    left, right = cast_columns(x0, x1, x2, x3, scales, transpose.dtype.element_ty)
    store_turned(transpose, left, right, row, column, M, K, ROWS, WHOLE)


# --- host ---------------------------------------------------------------------------------------------------


def packs(x: torch.Tensor) -> bool:
    """Whether x [..., K] can be read as the words of this file: instructions on two values of 16 bits begin with sm_90. A parameter that is a
    part of a flat one may begin at any value."""
    offset = x.storage_offset()
    begins_at_words = isinstance(offset, int) and offset % 8 == 0 and x.shape[-1] % 8 == 0
    return x.dtype == torch.bfloat16 and begins_at_words and target_of(x.device).capability >= (9, 0)


def whole_tiles(rows: Size, columns: Size, tile_rows: int) -> bool:
    """Whether [rows, columns] is known to be whole tiles, so that nothing is masked; a symbolic size never is."""
    sizes = isinstance(rows, int) and isinstance(columns, int)
    return sizes and rows % tile_rows == 0 and columns % 128 == 0
