"""The Triton kernels of kernels/quantize/nvfp4.py, which says what they compute and launches them."""

# Tuples of tensors grow in unrolled loops, of which mypy sees one turn.
# mypy: disable-error-code="assignment"

from __future__ import annotations

from te_dynamo.kernels.quantize.e2m1 import (
    TENSOR_MAX,
    amaxes,
    block_scale,
    hadamard,
    interleave,
    load_one_or_two,
    magnitude,
    pack_columns,
    pack_row,
    store_scales,
    store_words,
    tensor_scale,
)
from te_dynamo.kernels.quantize.nvfp4_words import (
    amax_of_halves,
    larger_transformed,
    load_column_blocks,
    quantize_strip,
    quantize_words,
)
from te_dynamo.kernels.runtime._triton import tl, triton
from te_dynamo.kernels.runtime.writes import writes
from te_dynamo.kernels.tiles.block_words import larger_halves, magnitudes
from te_dynamo.kernels.tiles.fp8 import (
    abs_bits,
    load_tile,
    mul_rn,
    store_partial_amax,
    store_tile,
    tile_mask,
    tile_offsets,
    tile_origin,
    tile_total,
)

__all__ = ["dequantize_nvfp4_kernel", "hadamard_amax_kernel", "nvfp4_epilogue_kernel", "quantize_nvfp4_kernel"]

# --- quantize -----------------------------------------------------------------------------------------------


@triton.jit
def load_blocks(x, row, column, M, K, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):
    """A tile of x [M, K], zero outside, as sixteen [BLOCK_M/16, BLOCK_K]: [g, k] of the i-th is row + 16 g + i, column + k."""
    rows, columns = 16 * tl.arange(0, BLOCK_M // 16)[:, None], tl.arange(0, BLOCK_K)[None, :]
    corner = x + (row.to(tl.int64) * K + column)
    tile = ()
    for i in tl.static_range(16):
        mask = (row + rows + i < M) & (column + columns < K)
        tile += (tl.load(corner + ((rows + i) * K + columns), mask=mask, other=0.0).to(tl.float32),)
    return tile


@writes("partials")
@triton.jit
def words_amax_kernel(x, partials, WORDS, BLOCK: tl.constexpr):
    """Partial amaxes of the bf16 x, read as WORDS words of two from end to end."""
    most = tl.zeros((BLOCK,), tl.int32)
    words, index = x.to(tl.pointer_type(tl.int32)), tl.arange(0, BLOCK)
    for block in tl.range(tl.program_id(0), tl.cdiv(WORDS, BLOCK), tl.num_programs(0), num_stages=1):
        left = WORDS - block * BLOCK
        corner = words + tl.cast(block, tl.int64) * BLOCK
        if left >= BLOCK:  # noqa: SIM108
            value = tl.load(corner + index)
        else:
            value = tl.load(corner + index, mask=index < left, other=0)
        most = larger_halves(most, magnitudes(value))
    store_partial_amax(partials, abs_bits(amax_of_halves(most)))


@writes("columnwise_partials", partials="ROWWISE")
@triton.jit
def hadamard_amax_kernel(
    x,
    partials,
    columnwise_partials,
    M,
    K: tl.constexpr,
    ROWWISE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PACKED: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Partial amaxes of x's transformed columns and, if ROWWISE, of x itself, one of each a program.

    Words are read a tile ahead. They are the first to leave the caches, although the second launch reads them again: faster on an H200.
    """
    G: tl.constexpr = BLOCK_M // 16
    tiles = tile_total(M, K, BLOCK_M, BLOCK_K)
    if PACKED:
        most, words = tl.zeros((G, BLOCK_K // 2), tl.float32), tl.zeros((G, BLOCK_K // 2), tl.int32)
        row, column = tile_origin(tl.program_id(0), K, BLOCK_M, BLOCK_K)
        # Zero if there is no such tile.
        w = load_column_blocks(x, (row, column, M, K), BLOCK_M, BLOCK_K, WHOLE=False, KEPT=False)
        for tile in tl.range(tl.program_id(0) + tl.num_programs(0), tiles, tl.num_programs(0), num_stages=1):
            row, column = tile_origin(tile, K, BLOCK_M, BLOCK_K)
            following = load_column_blocks(x, (row, column, M, K), BLOCK_M, BLOCK_K, WHOLE, KEPT=False)
            most, words = larger_transformed(w, most, words, ROWWISE)
            w = following
        most, words = larger_transformed(w, most, words, ROWWISE)
        bits, columnwise_bits = abs_bits(amax_of_halves(words)), abs_bits(most * 0.25)
    else:
        bits, columnwise_bits = tl.zeros((G, BLOCK_K), tl.int32), tl.zeros((G, BLOCK_K), tl.int32)
        for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=1):
            row, column = tile_origin(tile, K, BLOCK_M, BLOCK_K)
            values = load_blocks(x, row, column, M, K, BLOCK_M, BLOCK_K)
            turned = hadamard(values)
            for i in tl.static_range(16):
                if ROWWISE:
                    bits = tl.maximum(bits, abs_bits(values[i]))
                columnwise_bits = tl.maximum(columnwise_bits, abs_bits(turned[i]))
    if ROWWISE:
        store_partial_amax(partials, bits)
    store_partial_amax(columnwise_partials, columnwise_bits)


@triton.jit
def grouped_tile(tile, K, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):
    """(first row, first column) of the tile of that number of [M, K], M whole 128: 128 rows are walked together, column by column,
    so that the transposed codes and scales of programs that run together fill whole sectors."""
    GROUP: tl.constexpr = 128 // BLOCK_M
    across = tl.cdiv(K, BLOCK_K)
    place, group = tile // GROUP % across, tile // GROUP // across
    return (group * GROUP + tile % GROUP) * BLOCK_M, place * BLOCK_K


@writes(
    data="ROWWISE",
    scale_inv="ROWWISE",
    amax="ROWWISE",
    columnwise_data="COLUMNWISE",
    columnwise_scale_inv="COLUMNWISE",
    columnwise_amax="COLUMNWISE",
)
@triton.jit
def quantize_nvfp4_kernel(
    x,
    partials,
    columnwise_partials,
    random,
    data,
    scale_inv,
    amax,
    columnwise_data,
    columnwise_scale_inv,
    columnwise_amax,
    M,
    column_words,
    K: tl.constexpr,
    ROWWISE: tl.constexpr,
    COLUMNWISE: tl.constexpr,
    TWO_D: tl.constexpr,
    HADAMARD: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    PARTIALS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PACKED: tl.constexpr,
    WHOLE: tl.constexpr,
    STRIPS: tl.constexpr,
):
    """Every tile of x: scales and codes by rows, by columns, or both. column_words is M^16/8.

    PACKED: x is bf16 and its rows are whole 16 bytes; WHOLE: M and K are whole tiles; STRIPS: M is whole strips of four, of which
    a program has one.
    """
    TWO: tl.constexpr = ROWWISE and COLUMNWISE and HADAMARD  # whose amaxes differ
    first, second = 0, 0
    if STOCHASTIC:
        first, second = tl.load(random), tl.load(random + 1)
    bits = load_one_or_two(partials if ROWWISE else columnwise_partials, columnwise_partials, TWO, PARTIALS)
    if STRIPS:
        # The last strips first, which the amax launch has left in the cache; the first tile while the scale is found.
        strip, across = tl.num_programs(0) - 1 - tl.program_id(0), K // BLOCK_K
        top, column = strip // across * (4 * BLOCK_M), strip % across * BLOCK_K
        w = load_column_blocks(x, (top, column, M, K), BLOCK_M, BLOCK_K, WHOLE)
    by_rows, by_columns = (0, 0, 0, 0, 0, 0, 0), (0, 0, 0, 0, 0, 0, 0)
    value, columnwise_value = amaxes(bits, TWO)
    if ROWWISE:
        by_rows = tensor_scale(value, amax)
    if COLUMNWISE:
        by_columns = tensor_scale(columnwise_value, columnwise_amax)
        if ROWWISE and not HADAMARD:
            by_columns = by_rows  # the same, which the compiler does not know
    row_words: tl.constexpr = (K + 15) // 16 * 2
    if STRIPS:
        quantize_strip(
            w,
            x,
            data,
            scale_inv,
            columnwise_data,
            columnwise_scale_inv,
            (top, column, M, K, row_words, column_words),
            by_rows,
            by_columns,
            (first, second),
            ROWWISE,
            TWO_D,
            HADAMARD,
            STOCHASTIC,
            BLOCK_M,
            BLOCK_K,
        )
    else:
        tall, wide = (M + 127) // 128 * 128, (K + 127) // 128 * 128  # whose scales are written
        tiles = tile_total(tall, wide, BLOCK_M, BLOCK_K)
        for index in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=1):
            row, column = grouped_tile(tiles - 1 - index, wide, BLOCK_M, BLOCK_K)
            if PACKED:
                quantize_words(
                    x,
                    data,
                    scale_inv,
                    columnwise_data,
                    columnwise_scale_inv,
                    (row, column, M, K, row_words, column_words),
                    by_rows,
                    by_columns,
                    (first, second),
                    ROWWISE,
                    COLUMNWISE,
                    TWO_D,
                    HADAMARD,
                    STOCHASTIC,
                    BLOCK_M,
                    BLOCK_K,
                    WHOLE,
                )
            else:
                quantize_elements(
                    x,
                    data,
                    scale_inv,
                    columnwise_data,
                    columnwise_scale_inv,
                    (row, column, M, K, row_words, column_words),
                    by_rows,
                    by_columns,
                    (first, second),
                    ROWWISE,
                    COLUMNWISE,
                    TWO_D,
                    HADAMARD,
                    STOCHASTIC,
                    BLOCK_M,
                    BLOCK_K,
                )


@triton.jit
def quantize_elements(
    x,
    data,
    scale_inv,
    columnwise_data,
    columnwise_scale_inv,
    place,
    by_rows,
    by_columns,
    key,
    ROWWISE: tl.constexpr,
    COLUMNWISE: tl.constexpr,
    TWO_D: tl.constexpr,
    HADAMARD: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One tile of x of any dtype. place: (row, column, M, K, row_words, column_words); by_rows, by_columns:
    `tensor_scale`; key: the two words of `random`."""
    G: tl.constexpr = BLOCK_M // 16
    B: tl.constexpr = BLOCK_K // 16
    row, column, M, K, row_words, column_words = place
    values = load_blocks(x, row, column, M, K, BLOCK_M, BLOCK_K)
    if TWO_D:
        shared = tl.max(tl.reshape(magnitude(values), (G, B, 16)), axis=2)
    if ROWWISE:
        words, scales = (), ()
        for i in tl.static_range(16):
            block_amax = shared if TWO_D else tl.max(tl.abs(tl.reshape(values[i], (G, B, 16))), axis=2)
            scale, enc = block_scale(block_amax, by_rows)
            rows = row + i + 16 * tl.arange(0, G)[:, None]
            number = rows * (row_words // 2) + (column // 16 + tl.arange(0, B)[None, :])
            words += (pack_row(values[i], enc, by_rows[4], number, key[0], key[1], STOCHASTIC, G, B),)
            scales += (scale.to(tl.uint8, bitcast=True),)
        store_words(data, interleave(words, G, 2 * B), row, column // 8, row_words, M, BLOCK_M, 2 * B, False)
        store_scales(scale_inv, interleave(scales, G, B), row, column // 16, M, K, BLOCK_M, B, False)
    if COLUMNWISE:
        turned = hadamard(values) if HADAMARD else values
        if TWO_D:
            block_amax = tl.reshape(tl.broadcast_to(shared[:, :, None], (G, B, 16)), (G, BLOCK_K))
        else:
            block_amax = magnitude(turned)
        scale, enc = block_scale(block_amax, by_columns)
        columns = column + tl.arange(0, BLOCK_K)[None, :]
        number = columns * (column_words // 2) + (row // 16 + tl.arange(0, G)[:, None])
        low, high = pack_columns(turned, enc, by_columns[4], number, key[1], key[0], STOCHASTIC)
        words = tl.reshape(tl.permute(tl.join(low, high), (1, 0, 2)), (BLOCK_K, 2 * G))
        store_words(columnwise_data, words, column, row // 8, column_words, K, BLOCK_K, 2 * G, False)
        scale = tl.trans(scale.to(tl.uint8, bitcast=True))
        store_scales(columnwise_scale_inv, scale, column, row // 16, K, M, BLOCK_K, G, False)


# --- dequantize, end of the GEMM ----------------------------------------------------------------------------


@writes("y")
@triton.jit
def dequantize_nvfp4_kernel(
    data,
    scale_inv,
    amax,
    y,
    R,
    columns,
    row_bytes,
    HAS_AMAX: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    """One tile of y [R, columns] = q * scale (* amax / 2688) from data [R, row_bytes]."""
    row, byte = tile_origin(tl.program_id(0), row_bytes, BLOCK_R, BLOCK_B)
    inside = tile_mask(row, byte, R, row_bytes, BLOCK_R, BLOCK_B)
    packed = tl.load(data + tile_offsets(row, byte, row_bytes, BLOCK_R, BLOCK_B), mask=inside, other=0).to(tl.int32)
    codes = tl.reshape(tl.join(packed, packed >> 4), (BLOCK_R, BLOCK_B // 8, 16))
    # As fp32's exponent and mantissa e2m1's are 2^126 too small, and subnormal where e2m1 is.
    value = (((codes & 7) << 22) | ((codes & 8) << 28)).to(tl.float32, bitcast=True) * 8.507059173023462e37
    blocks = row_bytes // 8
    padded_blocks = (blocks + 3) // 4 * 4
    scale = tl.load(
        scale_inv + tile_offsets(row, byte // 8, padded_blocks, BLOCK_R, BLOCK_B // 8),
        mask=tile_mask(row, byte // 8, R, blocks, BLOCK_R, BLOCK_B // 8),
        other=0,
    )
    value = value * scale.to(tl.float8e4nv, bitcast=True).to(tl.float32)[:, :, None]
    if HAS_AMAX:
        value = value * tl.div_rn(tl.load(amax), tl.full((), TENSOR_MAX, tl.float32))
    value = tl.reshape(value, (BLOCK_R, 2 * BLOCK_B))
    store_tile(y, value, row, 2 * byte, R, columns, BLOCK_R, 2 * BLOCK_B)


@writes("c")
@triton.jit
def nvfp4_epilogue_kernel(
    product, a_amax, b_amax, bias, c, M, N, HAS_BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """One tile of c = round(product * (amaxA / 2688 * amaxB / 2688) + bias), every step an fp32 operation."""
    row, column = tile_origin(tl.program_id(0), N, BLOCK_M, BLOCK_N)
    full = tl.full((), TENSOR_MAX, tl.float32)
    alpha = tl.div_rn(tl.load(a_amax), full) * tl.div_rn(tl.load(b_amax), full)
    value = mul_rn(load_tile(product, row, column, N, M, N, BLOCK_M, BLOCK_N), alpha)
    if HAS_BIAS:
        columns = column + tl.arange(0, BLOCK_N)
        value = value + tl.load(bias + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    store_tile(c, value, row, column, M, N, BLOCK_M, BLOCK_N)
