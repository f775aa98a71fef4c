"""The kernels that mxfp8.py launches. x in bf16 with rows of whole 16 bytes (PACKED) is read as words of two: tiles/block_words.py."""

from __future__ import annotations

from te_dynamo.kernels.layouts.tiled_scales import scale_offsets
from te_dynamo.kernels.quantize.block_kernels import code_and_multiplier, four_times, word_codes
from te_dynamo.kernels.runtime._triton import tl, triton
from te_dynamo.kernels.runtime.writes import writes
from te_dynamo.kernels.tiles.block_words import (
    both_halves,
    cast_rows,
    high_halves,
    larger_halves,
    load_words,
    low_halves,
    magnitudes,
    places_of_words,
)
from te_dynamo.kernels.tiles.blocks import decode_e8m0, widened_again
from te_dynamo.kernels.tiles.fp8 import abs_bits, load_values, tile_mask, tile_offsets, tile_origin
from te_dynamo.kernels.tiles.groups import in_padded_order

# --- scales -------------------------------------------------------------------------------------------------


@triton.jit
def columnwise_scale_offsets(i, j, M, K, SWIZZLED: tl.constexpr):
    """Where the code of block j of column i lies in the columnwise scales of blocks of 32 of a [M, K] tensor."""
    if SWIZZLED:
        return scale_offsets(i, j, tl.cdiv(M, 128) * 4, SWIZZLED)
    return j * (tl.cdiv(K, 128) * 128) + i


@writes(
    data=lambda k: k.ROWWISE or k.TWO_D,
    scale_inv="ROWWISE",
    columnwise_data=lambda k: k.COLUMNWISE and not k.TWO_D,
    columnwise_scale_inv="COLUMNWISE",
)
@triton.jit
def quantize_mxfp8_kernel(
    x,
    offs,
    data,
    scale_inv,
    columnwise_data,
    columnwise_scale_inv,
    x_rows,
    M,
    K,
    G,
    GROUPS: tl.constexpr,
    FMAX: tl.constexpr,
    ROWWISE: tl.constexpr,
    COLUMNWISE: tl.constexpr,
    SWIZZLED: tl.constexpr,
    SCALE_BLOCK: tl.constexpr,
    TWO_D: tl.constexpr,
    GROUP_M: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PACKED: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Blocks of 32, or TWO_D of 32x32; along rows alone of SCALE_BLOCK. A program reads one tile of x once: codes and data of its blocks.

    Tiles cover [M^128, K^128]: what lies outside x reads as zero and has code 0, which is how scales are padded. The
    conversion to float8 saturates, so nothing is clamped before it. The grid is (tiles of a row, tiles of 128 GROUP_M rows,
    128 GROUP_M rows each): no program divides for its tile. offs, x_rows, G, GROUPS: as `quantize_block_kernel`'s.
    """
    row = tl.program_id(2) * (128 * GROUP_M) + tl.program_id(1) * BLOCK_M
    column = tl.program_id(0) * BLOCK_K
    if GROUP_M > 1:  # noqa: SIM102 (a branch of the compiler's, and one of the GPU's)
        if row >= tl.cdiv(M, 128) * 128:
            return
    first = tl.program_id(2) * 128 if GROUP_M == 1 else row // 128 * 128
    x, last = in_padded_order(x, first, offs, x_rows, M, K, G, GROUPS)
    buffers = data, scale_inv, columnwise_data, columnwise_scale_inv
    place = row, column, M, K
    if PACKED:
        values = (
            load_words(x, row, column, half_rows(0, BLOCK_M), last, K, BLOCK_K // 2, WHOLE),
            load_words(x, row, column, half_rows(1, BLOCK_M), last, K, BLOCK_K // 2, WHOLE),
        )
    else:
        values = load_values(x, row, column, K, last, K, BLOCK_M, BLOCK_K)
    FORM: tl.constexpr = (FMAX, ROWWISE, COLUMNWISE, SWIZZLED, SCALE_BLOCK, TWO_D, BLOCK_M, BLOCK_K)
    quantize_mxfp8_tile(values, buffers, place, FORM, PACKED, WHOLE)


@triton.jit
def quantize_mxfp8_tile(values, buffers, place, FORM: tl.constexpr, PACKED: tl.constexpr, WHOLE: tl.constexpr):
    """Codes and data of one tile. place: (first row, first column, M, K). values: words of two halves (`half_rows`), or all of it.

    FORM: (FMAX, ROWWISE, COLUMNWISE, SWIZZLED, SCALE_BLOCK, TWO_D, BLOCK_M, BLOCK_K).
    """
    TWO_D: tl.constexpr = FORM[5]
    if TWO_D:
        quantize_squares(values, buffers, place, FORM, PACKED, WHOLE)
    elif PACKED:
        quantize_mxfp8_words(values, buffers, place, FORM, WHOLE)
    else:
        quantize_mxfp8_elements(values, buffers, place, FORM)


@triton.jit
def half_rows(J: tl.constexpr, BLOCK_M: tl.constexpr):
    """[BLOCK_M / 2]: the J-th 16 rows of each 32, or the J-th half of fewer."""
    COUNT: tl.constexpr = min(BLOCK_M // 2, 16)
    i = tl.arange(0, BLOCK_M // 2)
    return i // COUNT * (2 * COUNT) + J * COUNT + i % COUNT


@triton.jit
def store_half(
    data, words, multipliers, place, J: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, WHOLE: tl.constexpr
):
    """Writes the codes of the words of half J times multipliers (bf16, of the same shape) to data [M, K]."""
    row, column, M, K = place
    corner, offsets, mask = places_of_words(row, column, half_rows(J, BLOCK_M), M, K, BLOCK_K // 2)
    places = (data.to(tl.pointer_type(tl.int16)) + corner) + offsets
    codes = cast_rows(words, multipliers, data.dtype.element_ty)
    if WHOLE:
        tl.store(places, codes)
    else:
        tl.store(places, codes, mask=mask)


@triton.jit
def along_rows(words, R: tl.constexpr, B: tl.constexpr, N: tl.constexpr):
    """words [R, B] repeated N times each: [R, N B]."""
    return tl.reshape(tl.broadcast_to(words[:, :, None], (R, B, N)), (R, B * N))


@triton.jit
def store_row_blocks(scale_inv, code, rows, column, K, SWIZZLED: tl.constexpr, SCALE_BLOCK: tl.constexpr):
    """Writes the codes (int32 [R, B]) of the blocks from `column` on of these rows to rowwise scales, that of a block of 128
    four times, as a word: zero past K."""
    blocks = column // 32 + tl.arange(0, code.shape[1])[None, :] * (SCALE_BLOCK // 32)
    places = scale_inv + scale_offsets(rows[:, None], blocks, tl.cdiv(K, 128) * 4, SWIZZLED)
    if SCALE_BLOCK == 32:
        tl.store(places, code.to(tl.uint8))
    else:
        words = four_times(code, blocks, tl.cdiv(K, 32))
        tl.store(places.to(tl.pointer_type(tl.int32), bitcast=True), words)


@triton.jit
def quantize_mxfp8_words(values, buffers, place, FORM: tl.constexpr, WHOLE: tl.constexpr):
    """A tile in two halves, so that rows that lie 16 apart share words of amaxes and of codes."""
    FMAX: tl.constexpr = FORM[0]
    ROWWISE: tl.constexpr = FORM[1]
    COLUMNWISE: tl.constexpr = FORM[2]
    SWIZZLED: tl.constexpr = FORM[3]
    SCALE_BLOCK: tl.constexpr = FORM[4]
    BLOCK_M: tl.constexpr = FORM[6]
    BLOCK_K: tl.constexpr = FORM[7]
    data, scale_inv, columnwise_data, columnwise_scale_inv = buffers
    row, column, M, K = place
    R: tl.constexpr = BLOCK_M // 2
    W: tl.constexpr = BLOCK_K // 2
    B: tl.constexpr = BLOCK_K // SCALE_BLOCK
    upper, lower = values
    if ROWWISE:
        # Four words of a thread first; then two rows share a word.
        high = tl.reduce(tl.reshape(magnitudes(upper), (R, W // 4, 4)), 2, larger_halves)
        low = tl.reduce(tl.reshape(magnitudes(lower), (R, W // 4, 4)), 2, larger_halves)
        both = larger_halves(low_halves(high, low), high_halves(high, low))
        codes, multipliers = word_codes(tl.reduce(tl.reshape(both, (R, B, W // 4 // B)), 2, larger_halves), FMAX)
        store_row_blocks(scale_inv, codes & 0xFF, row + half_rows(0, BLOCK_M), column, K, SWIZZLED, SCALE_BLOCK)
        store_row_blocks(scale_inv, codes >> 16, row + half_rows(1, BLOCK_M), column, K, SWIZZLED, SCALE_BLOCK)
        multiplier = along_rows(low_halves(multipliers, multipliers), R, B, W // B)
        store_half(data, upper, multiplier, place, 0, BLOCK_M, BLOCK_K, WHOLE)
        multiplier = along_rows(high_halves(multipliers, multipliers), R, B, W // B)
        store_half(data, lower, multiplier, place, 1, BLOCK_M, BLOCK_K, WHOLE)
    if COLUMNWISE:
        most = tl.reshape(larger_halves(magnitudes(upper), magnitudes(lower)), (BLOCK_M // 32, 16, W))
        codes, multipliers = word_codes(tl.reduce(most, 1, larger_halves), FMAX)
        columns = column + 2 * tl.arange(0, W)[None, :]
        blocks = row // 32 + tl.arange(0, BLOCK_M // 32)[:, None]
        left = columnwise_scale_offsets(columns, blocks, M, K, SWIZZLED)
        if SWIZZLED:
            tl.store(columnwise_scale_inv + left, codes.to(tl.uint8))
            right = columnwise_scale_offsets(columns + 1, blocks, M, K, SWIZZLED)
            tl.store(columnwise_scale_inv + right, (codes >> 16).to(tl.uint8))
        else:
            pairs = (codes | (codes >> 8)).to(tl.uint16)
            tl.store(columnwise_scale_inv.to(tl.pointer_type(tl.uint16)) + left // 2, pairs)
        multiplier = tl.reshape(tl.broadcast_to(multipliers[:, None, :], (BLOCK_M // 32, 16, W)), (R, W))
        store_half(columnwise_data, upper, multiplier, place, 0, BLOCK_M, BLOCK_K, WHOLE)
        store_half(columnwise_data, lower, multiplier, place, 1, BLOCK_M, BLOCK_K, WHOLE)


@triton.jit
def quantize_mxfp8_elements(value, buffers, place, FORM: tl.constexpr):
    """A tile of any dtype."""
    FMAX: tl.constexpr = FORM[0]
    ROWWISE: tl.constexpr = FORM[1]
    COLUMNWISE: tl.constexpr = FORM[2]
    SWIZZLED: tl.constexpr = FORM[3]
    SCALE_BLOCK: tl.constexpr = FORM[4]
    BLOCK_M: tl.constexpr = FORM[6]
    BLOCK_K: tl.constexpr = FORM[7]
    data, scale_inv, columnwise_data, columnwise_scale_inv = buffers
    row, column, M, K = place
    BLOCKS_M: tl.constexpr = BLOCK_M // 32
    BLOCKS_K: tl.constexpr = BLOCK_K // SCALE_BLOCK
    offsets = tile_offsets(row, column, K, BLOCK_M, BLOCK_K)
    mask = tile_mask(row, column, M, K, BLOCK_M, BLOCK_K)
    bits = abs_bits(value)
    columns = column + tl.arange(0, BLOCK_K)[None, :]
    if ROWWISE:
        amax = tl.max(tl.reshape(bits, (BLOCK_M, BLOCKS_K, SCALE_BLOCK)), axis=2)
        code, multiplier = code_and_multiplier(amax, FMAX)
        scaled = tl.reshape(value.to(tl.float32), (BLOCK_M, BLOCKS_K, SCALE_BLOCK)) * multiplier[:, :, None]
        quantized = tl.reshape(scaled, (BLOCK_M, BLOCK_K)).to(data.dtype.element_ty)
        tl.store(data + offsets, quantized, mask=mask)
        store_row_blocks(scale_inv, code, row + tl.arange(0, BLOCK_M), column, K, SWIZZLED, SCALE_BLOCK)
    if COLUMNWISE:
        amax = tl.max(tl.reshape(bits, (BLOCKS_M, 32, BLOCK_K)), axis=1)
        code, multiplier = code_and_multiplier(amax, FMAX)
        scaled = tl.reshape(widened_again(value), (BLOCKS_M, 32, BLOCK_K)) * multiplier[:, None, :]
        quantized = tl.reshape(scaled, (BLOCK_M, BLOCK_K)).to(columnwise_data.dtype.element_ty)
        tl.store(columnwise_data + offsets, quantized, mask=mask)
        blocks = row // 32 + tl.arange(0, BLOCKS_M)[:, None]
        code_offsets = columnwise_scale_offsets(columns, blocks, M, K, SWIZZLED)
        tl.store(columnwise_scale_inv + code_offsets, code.to(tl.uint8))


@triton.jit
def quantize_squares(values, buffers, place, FORM: tl.constexpr, PACKED: tl.constexpr, WHOLE: tl.constexpr):
    """A tile in blocks of 32x32, of words or of any dtype: data once, for both usages."""
    FMAX: tl.constexpr = FORM[0]
    ROWWISE: tl.constexpr = FORM[1]
    COLUMNWISE: tl.constexpr = FORM[2]
    SWIZZLED: tl.constexpr = FORM[3]
    BLOCK_M: tl.constexpr = FORM[6]
    BLOCK_K: tl.constexpr = FORM[7]
    data, scale_inv, _, columnwise_scale_inv = buffers
    row, column, M, K = place
    A: tl.constexpr = BLOCK_M // 32
    B: tl.constexpr = BLOCK_K // 32
    if PACKED:
        upper, lower = values
        most = tl.reshape(larger_halves(magnitudes(upper), magnitudes(lower)), (A, 16, B, 16))
        most = tl.reduce(tl.reduce(most, 3, larger_halves), 1, larger_halves)
        codes, multipliers = word_codes(both_halves(most), FMAX)
        code = codes & 0xFF
        each = tl.reshape(tl.broadcast_to(multipliers[:, None, :, None], (A, 16, B, 16)), (BLOCK_M // 2, BLOCK_K // 2))
        store_half(data, upper, each, place, 0, BLOCK_M, BLOCK_K, WHOLE)
        store_half(data, lower, each, place, 1, BLOCK_M, BLOCK_K, WHOLE)
    else:
        bits = tl.reshape(abs_bits(values), (A, 32, B, 32))
        code, multiplier = code_and_multiplier(tl.max(tl.max(bits, axis=3), axis=1), FMAX)
        scaled = tl.reshape(values.to(tl.float32), (A, 32, B, 32)) * multiplier[:, None, :, None]
        quantized = tl.reshape(scaled, (BLOCK_M, BLOCK_K)).to(data.dtype.element_ty)
        offsets = tile_offsets(row, column, K, BLOCK_M, BLOCK_K)
        tl.store(data + offsets, quantized, mask=tile_mask(row, column, M, K, BLOCK_M, BLOCK_K))
    # Once for each row and column of the tensor: zero past M and past K.
    if ROWWISE:
        rows = row + tl.arange(0, BLOCK_M)
        each_row = tl.reshape(tl.broadcast_to(code[:, None, :], (A, 32, B)), (BLOCK_M, B))
        store_row_blocks(scale_inv, tl.where(rows[:, None] < M, each_row, 0), rows, column, K, SWIZZLED, 32)
    if COLUMNWISE:
        columns = column + tl.arange(0, BLOCK_K)[None, :]
        each_column = tl.reshape(tl.broadcast_to(code[:, :, None], (A, B, 32)), (A, BLOCK_K))
        blocks = row // 32 + tl.arange(0, A)[:, None]
        places = columnwise_scale_inv + columnwise_scale_offsets(columns, blocks, M, K, SWIZZLED)
        tl.store(places, tl.where(columns < K, each_column, 0).to(tl.uint8))


@writes("values")
@triton.jit
def dequantize_mxfp8_kernel(
    data,
    scale_inv,
    values,
    M,
    K,
    COLUMNWISE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """values [M, K] = data * 2^(code - 127), rounded once; codes lie as COLUMNWISE says (the module's table)."""
    BLOCKS_M: tl.constexpr = BLOCK_M // 32 if COLUMNWISE else BLOCK_M
    BLOCKS_K: tl.constexpr = BLOCK_K if COLUMNWISE else BLOCK_K // 32
    row, column = tile_origin(tl.program_id(0), K, BLOCK_M, BLOCK_K)
    offsets = tile_offsets(row, column, K, BLOCK_M, BLOCK_K)
    mask = tile_mask(row, column, M, K, BLOCK_M, BLOCK_K)
    quantized = tl.load(data + offsets, mask=mask, other=0.0)
    i = (row // 32 if COLUMNWISE else row) + tl.arange(0, BLOCKS_M)[:, None]
    j = (column if COLUMNWISE else column // 32) + tl.arange(0, BLOCKS_K)[None, :]
    stride = tl.cdiv(K, 128) * (128 if COLUMNWISE else 4)
    power = decode_e8m0(tl.load(scale_inv + i * stride + j))
    if COLUMNWISE:
        value = tl.reshape(quantized.to(tl.float32), (BLOCKS_M, 32, BLOCK_K)) * power[:, None, :]
    else:
        value = tl.reshape(quantized.to(tl.float32), (BLOCK_M, BLOCKS_K, 32)) * power[:, :, None]
    tl.store(values + offsets, tl.reshape(value, (BLOCK_M, BLOCK_K)).to(values.dtype.element_ty), mask=mask)
