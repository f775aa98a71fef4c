"""A tile as four quarters, [BLOCK_M / 4, BLOCK_K], quarter J of which holds the rows 4 i + J: a thread then has four rows of
each of its columns, and their float8 codes go to the transpose as 32-bit words, at half the instructions of moving bytes.

Backward of activations uses them, because arithmetic is its limit. In `quantize`, where memory is, the whole tiles of
`fp8.store_quantized_tile` are faster: by 6% on an H200, row and column.
"""

from __future__ import annotations

from te_dynamo.kernels.runtime._triton import tl, triton
from te_dynamo.kernels.tiles.fp8 import tile_mask, tile_offsets, widened

__all__: list[str] = []


@triton.jit
def quarter_offsets(row, column, row_stride, J: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):
    """Element offsets of quarter J of the tile: 64 bits for the tile's corner only, 32 inside."""
    rows = J + 4 * tl.arange(0, BLOCK_M // 4)
    corner = row.to(tl.int64) * row_stride + column
    return corner + (rows[:, None] * row_stride + tl.arange(0, BLOCK_K)[None, :])


@triton.jit
def quarter_mask(row, column, M, K, J: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):
    """Which elements of quarter J lie inside [M, K]."""
    rows = row + J + 4 * tl.arange(0, BLOCK_M // 4)
    return (rows < M)[:, None] & (column + tl.arange(0, BLOCK_K) < K)[None, :]


@triton.jit
def load_quarter(x, row, column, row_stride, M, K, J: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):
    """Quarter J of the tile of x [M, K] in fp32, zero outside."""
    offsets = quarter_offsets(row, column, row_stride, J, BLOCK_M, BLOCK_K)
    return widened(tl.load(x + offsets, mask=quarter_mask(row, column, M, K, J, BLOCK_M, BLOCK_K), other=0.0))


@triton.jit
def load_codes(codes, row, column, M, K, J: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):
    """Quarter J of the tile of int8 codes [M, K], zero outside."""
    offsets = quarter_offsets(row, column, K, J, BLOCK_M, BLOCK_K)
    return tl.load(codes + offsets, mask=quarter_mask(row, column, M, K, J, BLOCK_M, BLOCK_K), other=0)


@triton.jit
def store_quarter(
    y, value, row, column, row_stride, M, K, J: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr
):
    """Writes quarter J of a tile of y [M, K]."""
    mask = quarter_mask(row, column, M, K, J, BLOCK_M, BLOCK_K)
    tl.store(y + quarter_offsets(row, column, row_stride, J, BLOCK_M, BLOCK_K), value, mask=mask)


@triton.jit
def quarter_codes(x, scale, DTYPE: tl.constexpr):
    """Codes (int8) of x * scale in DTYPE, as `fp8.saturating_cast`, in whole registers."""
    KIND: tl.constexpr = "e4m3x2" if tl.float8e4nv == DTYPE else "e5m2x2"
    ASM: tl.constexpr = (
        "{ .reg .b16 low, high;"
        " cvt.rn.satfinite." + KIND + ".f32 low, $2, $1;"
        " cvt.rn.satfinite." + KIND + ".f32 high, $4, $3;"
        " mov.b32 $0, {low, high}; }"
    )
    value = widened(x) * scale
    return tl.inline_asm_elementwise(ASM, "=r,r,r,r,r", [value], dtype=tl.int8, is_pure=True, pack=4)


@triton.jit
def column_words(c0, c1, c2, c3):
    """Words of the four quarters' codes, that of c0 lowest."""
    ASM: tl.constexpr = (
        "{ .reg .b32 upper, lower;"
        " prmt.b32 upper, $4, $5, 0x5140; prmt.b32 lower, $6, $7, 0x5140;"
        " prmt.b32 $0, upper, lower, 0x5410; prmt.b32 $1, upper, lower, 0x7632;"
        " prmt.b32 upper, $4, $5, 0x7362; prmt.b32 lower, $6, $7, 0x7362;"
        " prmt.b32 $2, upper, lower, 0x5410; prmt.b32 $3, upper, lower, 0x7632; }"
    )
    return tl.inline_asm_elementwise(
        ASM, "=&r,=&r,=&r,=&r,r,r,r,r", [c0, c1, c2, c3], dtype=tl.int32, is_pure=True, pack=4
    )


@triton.jit
def store_codes(codes, place, data, transpose, ROWWISE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):
    """Writes the codes of the four quarters to transpose [K, M rounded up to 16] and, if ROWWISE, to data [M, K]; past M they
    must be 0. place: (row, column, data's row stride, M, K)."""
    c0, c1, c2, c3 = codes
    row, column, data_stride, M, K = place
    if ROWWISE:
        rows = data.to(tl.pointer_type(tl.int8), bitcast=True)
        store_quarter(rows, c0, row, column, data_stride, M, K, 0, BLOCK_M, BLOCK_K)
        store_quarter(rows, c1, row, column, data_stride, M, K, 1, BLOCK_M, BLOCK_K)
        store_quarter(rows, c2, row, column, data_stride, M, K, 2, BLOCK_M, BLOCK_K)
        store_quarter(rows, c3, row, column, data_stride, M, K, 3, BLOCK_M, BLOCK_K)
    words = tl.trans(column_words(c0, c1, c2, c3))
    # Computed here, not passed: the compiler then sees a multiple of 4 and stores whole vectors.
    stride = (M + 15) // 16 * 4
    places = transpose.to(tl.pointer_type(tl.int32), bitcast=True)
    places += tile_offsets(column, row // 4, stride, BLOCK_K, BLOCK_M // 4)
    tl.store(places, words, mask=tile_mask(column, row // 4, K, stride, BLOCK_K, BLOCK_M // 4))
