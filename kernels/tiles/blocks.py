"""A tile of an [M, K] tensor held in registers and quantized by rows, by columns or by both: device functions that
the formats with one scale a block share (kernels/quantize/float8_block.py shows how they go together).

A tile is four quarters, tensors [ROWS / 4, COLUMNS] in x's dtype: quarter j holds the rows 4i + j. A thread then has
four consecutive rows of each of its columns, and writes their codes to the transpose as one 32-bit word: bytes that
change place one by one cost more than all the arithmetic.

Amaxes are bit patterns of fp32 (`fp8.abs_bits`): as integers they order as the magnitudes do, inf above the finite
and NaN above inf.
"""

from __future__ import annotations

from te_dynamo.kernels.layouts.sizes import Size, blocks_of
from te_dynamo.kernels.runtime._triton import tl, triton
from te_dynamo.kernels.runtime.launch import size_hint
from te_dynamo.kernels.tiles.fp8 import abs_bits, tile_mask

COLUMNS: tl.constexpr = tl.constexpr(128)


# --- place and load -----------------------------------------------------------------------------------------


@triton.jit
def grouped_tile(ROWS: tl.constexpr, GROUP_M: tl.constexpr):
    """(first row, first column) of this program's tile in a launch over `grouped_grid`; the row may lie past the last."""
    return (tl.program_id(2) * GROUP_M + tl.program_id(0)) * ROWS, tl.program_id(1) * COLUMNS


@triton.jit
def quarter_offsets(row, column, K, J: tl.constexpr, ROWS: tl.constexpr):
    """Element offsets of quarter J of the tile at (row, column)."""
    rows = J + 4 * tl.arange(0, ROWS // 4)
    return tl.cast(row, tl.int64) * K + column + (rows[:, None] * K + tl.arange(0, COLUMNS)[None, :])


@triton.jit
def quarter_mask(row, column, M, K, J: tl.constexpr, ROWS: tl.constexpr):
    """Which elements of the quarter lie inside [M, K]."""
    rows = row + J + 4 * tl.arange(0, ROWS // 4)
    return (rows < M)[:, None] & (column + tl.arange(0, COLUMNS) < K)[None, :]


@triton.jit
def load_quarter(x, row, column, M, K, J: tl.constexpr, ROWS: tl.constexpr):
    """Quarter J of the tile, in x's dtype, zero outside."""
    mask = quarter_mask(row, column, M, K, J, ROWS)
    return tl.load(x + quarter_offsets(row, column, K, J, ROWS), mask=mask, other=0.0)


@triton.jit
def load_quarters(x, row, column, M, K, ROWS: tl.constexpr):
    """The tile's four quarters."""
    return (
        load_quarter(x, row, column, M, K, 0, ROWS),
        load_quarter(x, row, column, M, K, 1, ROWS),
        load_quarter(x, row, column, M, K, 2, ROWS),
        load_quarter(x, row, column, M, K, 3, ROWS),
    )


# --- amax ---------------------------------------------------------------------------------------------------


@triton.jit
def magnitude(x):
    """Bit pattern of |x| as an integer of x's width: of 16-bit values the compiler takes the maximum of two at once, where the GPU can."""
    return x.to(tl.int16, bitcast=True) & 0x7FFF if x.dtype.primitive_bitwidth == 16 else abs_bits(x)


@triton.jit
def fp32_bits(magnitudes, DTYPE: tl.constexpr):
    """The amax's fp32 bit pattern from its magnitude in x's dtype; a reduction has made int32 of a 16-bit one."""
    if DTYPE.primitive_bitwidth == 16:
        magnitudes = magnitudes.to(tl.int16)
    return abs_bits(magnitudes.to(DTYPE, bitcast=True))


@triton.jit
def row_amax(x):
    """Amax of each row of a quarter: [ROWS / 4]."""
    return fp32_bits(tl.max(magnitude(x), axis=1), x.dtype)


@triton.jit
def column_amax(x0, x1, x2, x3):
    """Amax of each column of the tile: [COLUMNS]."""
    upper = tl.maximum(magnitude(x0), magnitude(x1))
    lower = tl.maximum(magnitude(x2), magnitude(x3))
    return fp32_bits(tl.max(tl.maximum(upper, lower), axis=0), x0.dtype)


@triton.jit
def interleave(v0, v1, v2, v3, ROWS: tl.constexpr):
    """[ROWS] in the order of the rows from the values [ROWS / 4] of each quarter."""
    return tl.reshape(tl.join(tl.join(v0, v2), tl.join(v1, v3)), (ROWS,))


# --- cast and store -----------------------------------------------------------------------------------------


@triton.jit
def store_quarter(data, x, scale, row, column, M, K, J: tl.constexpr, ROWS: tl.constexpr):
    """Writes quarter J of cast(x * scale) to data [M, K]; scale is a scalar or [ROWS / 4, 1].

    The conversion instruction saturates and gives NaN one code, so nothing is clamped before it.
    """
    quantized = (x.to(tl.float32) * scale).to(data.dtype.element_ty)
    offsets = quarter_offsets(row, column, K, J, ROWS)
    tl.store(data + offsets, quantized, mask=quarter_mask(row, column, M, K, J, ROWS))


@triton.jit
def store_columns(transpose, x0, x1, x2, x3, scale, row, column, M, K, ROWS: tl.constexpr):
    """Writes cast(x * scale) to transpose [K, M rounded up to 16], zeros past M; scale is a scalar or [1, COLUMNS]."""
    words = cast_four(
        widened_again(x0) * scale,
        widened_again(x1) * scale,
        widened_again(x2) * scale,
        widened_again(x3) * scale,
        transpose.dtype.element_ty,
    )
    # Zeros past M, which a NaN for a scale would have made NaN: bytes of the rows that are left, from the lowest.
    left = M - row - 4 * tl.arange(0, ROWS // 4)
    kept = tl.where(left >= 4, -1, (1 << (8 * tl.minimum(tl.maximum(left, 0), 3))) - 1)
    words = words & kept[:, None]
    stride = (M + 15) // 16 * 4  # in words; computed here, so that the compiler sees a multiple of four
    word = row // 4
    corner = tl.cast(column, tl.int64) * stride + word
    offsets = corner + (tl.arange(0, COLUMNS)[:, None] * stride + tl.arange(0, ROWS // 4)[None, :])
    mask = tile_mask(column, word, K, stride, COLUMNS, ROWS // 4)
    tl.store(transpose.to(tl.pointer_type(tl.int32)) + offsets, tl.trans(words), mask=mask)


@triton.jit
def widened_again(x):
    """x in fp32. bf16 goes by an instruction of its own: for equal ones the compiler would keep the fp32 values of the
    cast by rows in registers until the cast by columns, and fewer tiles would fit on a multiprocessor."""
    if x.dtype == tl.bfloat16:
        asm: tl.constexpr = "prmt.b32 $0, $2, 0, 0x1044; prmt.b32 $1, $2, 0, 0x3244;"
        result = tl.inline_asm_elementwise(asm, "=f,=f,r", [x], dtype=tl.float32, is_pure=True, pack=2)
    else:
        result = x.to(tl.float32)
    return result


@triton.jit
def cast_four(a, b, c, d, DTYPE: tl.constexpr):
    """One 32-bit word of the float8 codes of a, b, c and d, a in its lowest byte; saturating, NaN has one code."""
    KIND: tl.constexpr = "e4m3x2" if tl.float8e4nv == DTYPE else "e5m2x2"
    asm: tl.constexpr = (
        "{ .reg .b16 low, high;"
        " cvt.rn.satfinite." + KIND + ".f32 low, $2, $1;"
        " cvt.rn.satfinite." + KIND + ".f32 high, $4, $3;"
        " mov.b32 $0, {low, high}; }"
    )
    return tl.inline_asm_elementwise(asm, "=r,f,f,f,f", [a, b, c, d], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def decode_e8m0(code):
    """E8M0 codes as the fp32 whose exponent field they are: 2^(code - 127), a denormal for 0, NaN for 255."""
    code = code.to(tl.int32)
    bits = tl.where(code == 0, 0x00400000, code << 23)
    return tl.where(code == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


# --- host ---------------------------------------------------------------------------------------------------

MOST_IN_Z = 65535
"""What CUDA takes for the third number of a grid."""


def group_of_rows(rows: Size, tile_rows: int, group: int = 1) -> int:
    """How many rows of tiles are one group: `group`, or more where CUDA would not take that many groups. A symbolic size counts as its hint."""
    return max(group, blocks_of(size_hint(rows), tile_rows * MOST_IN_Z))


def grouped_grid(rows: Size, columns: Size, tile_rows: int, group: int) -> tuple[Size, Size, Size]:
    """The grid of tiles of a [rows, columns] tensor: `group` rows of tiles are walked together, column by column, so that
    rows of the transpose are written to in long pieces too. Three numbers of a program, so that none divides for its tile."""
    return group, (columns + 127) // 128, (rows + tile_rows * group - 1) // (tile_rows * group)
