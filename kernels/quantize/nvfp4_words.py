"""A tile of a bf16 [M, K] tensor to NVFP4, read as 32-bit words of two neighbours, the left one in the low half.

Rows and columns each hold the tile in the order in which a thread has whole blocks: 16 neighbours of a row, or 16 rows of two
columns. Columns read x. In a strip of tiles rows have its words from there, through shared memory (kernels/quantize/shared_tile.py), elsewhere
they read it a second time, from the cache. What a thread does with a block is one piece of assembly (kernels/quantize/e2m1_assembly.py).

Rows of x must be whole 16 bytes, so that words never cross them.
"""

# Tuples of tensors grow in unrolled loops, of which mypy sees one turn.
# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

from te_dynamo.kernels.quantize.e2m1 import (
    block_hash,
    block_scale,
    marked,
    one_a_thread,
    store_scales,
    store_words,
)
from te_dynamo.kernels.quantize.e2m1_assembly import block_of_a_row, blocks_of_two_columns
from te_dynamo.kernels.quantize.hadamard_amax_assembly import amax_of_column_words
from te_dynamo.kernels.quantize.shared_tile import first_token, read_rows, shared_tile, write_tile
from te_dynamo.kernels.runtime._triton import tl, triton
from te_dynamo.kernels.tiles.block_words import both_halves, larger_halves, magnitudes
from te_dynamo.kernels.tiles.fp8 import larger_or_nan

__all__: list[str] = []

ROW: tl.constexpr = tl.constexpr(block_of_a_row(False, False))
ROW_SCALED: tl.constexpr = tl.constexpr(block_of_a_row(False, True))
ROW_STOCHASTIC: tl.constexpr = tl.constexpr(block_of_a_row(True, False))
ROW_STOCHASTIC_SCALED: tl.constexpr = tl.constexpr(block_of_a_row(True, True))
COLUMN: tl.constexpr = tl.constexpr(blocks_of_two_columns(False, False, False))
COLUMN_SCALED: tl.constexpr = tl.constexpr(blocks_of_two_columns(False, False, True))
COLUMN_STOCHASTIC: tl.constexpr = tl.constexpr(blocks_of_two_columns(False, True, False))
COLUMN_STOCHASTIC_SCALED: tl.constexpr = tl.constexpr(blocks_of_two_columns(False, True, True))
HADAMARD: tl.constexpr = tl.constexpr(blocks_of_two_columns(True, False, False))
HADAMARD_STOCHASTIC: tl.constexpr = tl.constexpr(blocks_of_two_columns(True, True, False))
WHOLE_HADAMARD_STOCHASTIC: tl.constexpr = tl.constexpr(blocks_of_two_columns(True, True, False, True))
AMAX: tl.constexpr = tl.constexpr(amax_of_column_words(False))
AMAXES: tl.constexpr = tl.constexpr(amax_of_column_words(True))

# --- load ---------------------------------------------------------------------------------------------------


@triton.jit
def load_row_blocks(x, place, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, WHOLE: tl.constexpr):
    """The tile's words, four times eight tensors [BLOCK_M / 4, BLOCK_K / 16]: [4 g + r, b] of the i-th of the q-th eight is word i of
    block b of row 16 g + 4 q + r; zero outside. They are in the threads that have the group in `load_column_blocks`."""
    tile = ()
    for q in tl.static_range(4):
        low = load_half_blocks(x, place, q, 0, BLOCK_M, BLOCK_K, WHOLE)
        high = load_half_blocks(x, place, q, 4, BLOCK_M, BLOCK_K, WHOLE)
        tile += (low + high,)
    return tile


@triton.jit
def first_rows(BLOCK_M: tl.constexpr):
    """The rows, [BLOCK_M / 4, 1], of the first eight tensors of `load_row_blocks`."""
    index = tl.arange(0, BLOCK_M // 4)[:, None]
    return index // 4 * 16 + index % 4


@triton.jit
def load_half_blocks(
    x,
    place,
    Q: tl.constexpr,
    WORD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Words WORD to WORD + 3 of the Q-th eight of `load_row_blocks`. The last to be read: they leave the cache first."""
    B: tl.constexpr = BLOCK_K // 16
    row, column, M, K = place[0], place[1], place[2], place[3]
    stride = K // 8 * 4  # so that the compiler sees whole 16 bytes
    index = tl.arange(0, 4 * B)
    # Four neighbours each, which the compiler does not see, and threads beside each other in a row.
    words = tl.multiple_of(tl.max_contiguous(index // 4 * 8 + index % 4, 4), 4)[None, :]
    rows = first_rows(BLOCK_M)
    corner = x.to(tl.pointer_type(tl.int32)) + (tl.cast(row, tl.int64) * stride + column // 2)
    places = (corner + (rows * stride + words)) + (4 * Q * stride + WORD)  # the last an offset in the instruction
    if WHOLE:
        four = tl.load(places, eviction_policy="evict_first")
    else:
        mask = (row + rows + 4 * Q < M) & (column // 2 + words + WORD < stride)
        four = tl.load(places, mask=mask, other=0, eviction_policy="evict_first")
    even, odd = tl.split(tl.reshape(four, (BLOCK_M // 4, B, 2, 2)))
    w0, w2 = tl.split(even)
    w1, w3 = tl.split(odd)
    return (w0, w1, w2, w3)


@triton.jit
def load_column_blocks(
    x, place, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, WHOLE: tl.constexpr, KEPT: tl.constexpr = True
):
    """The tile's words as sixteen tensors [BLOCK_M / 16, BLOCK_K / 2], the i-th those of rows 16 g + i; zero outside.
    If they are KEPT they are the last to leave the cache, which is for `load_row_blocks`, but faster in strips too; otherwise the
    first."""
    POLICY: tl.constexpr = "evict_last" if KEPT else "evict_first"
    row, column, M, K = place[0], place[1], place[2], place[3]
    stride = K // 8 * 4
    rows, words = 16 * tl.arange(0, BLOCK_M // 16)[:, None], tl.arange(0, BLOCK_K // 2)[None, :]
    corner = x.to(tl.pointer_type(tl.int32)) + (tl.cast(row, tl.int64) * stride + column // 2)
    tile = ()
    for i in tl.static_range(16):
        places = corner + ((rows + i) * stride + words)
        if WHOLE:
            tile += (tl.load(places, eviction_policy=POLICY),)
        else:
            mask = (row + rows + i < M) & (column // 2 + words < stride)
            tile += (tl.load(places, mask=mask, other=0, eviction_policy=POLICY),)
    return tile


# --- amax ---------------------------------------------------------------------------------------------------


@triton.jit
def larger_transformed(w, most, words, ROWWISE: tl.constexpr):
    """(`amax_of_column_words` of the sixteen tensors w and of most; if ROWWISE that of w and of words, otherwise words)."""
    if ROWWISE:
        most, words = tl.inline_asm_elementwise(
            AMAXES,
            "=f,=r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,f,r",
            w + (most, words),
            dtype=(tl.float32, tl.int32),
            is_pure=True,
            pack=1,
        )
    else:
        most = tl.inline_asm_elementwise(
            AMAX, "=f,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,f", w + (most,), dtype=tl.float32, is_pure=True, pack=1
        )
    return most, words


@triton.jit
def square_amax(w, G: tl.constexpr, B: tl.constexpr):
    """Amaxes [G, B] of blocks of 16x16 in the sixteen tensors w [G, 8 B]."""
    most = magnitudes(w[0])
    for i in tl.static_range(1, 16):
        most = larger_halves(most, magnitudes(w[i]))
    most = both_halves(tl.reduce(tl.reshape(most, (G, B, 8)), 2, larger_halves))
    return (most & 0x7FFF0000).to(tl.float32, bitcast=True)


@triton.jit
def amax_of_halves(words):
    """fp32 of the larger magnitude of each word's halves, NaN prevailing."""
    low, high = (words & 0x7FFF) << 16, words & 0x7FFF0000
    return larger_or_nan(low.to(tl.float32, bitcast=True), high.to(tl.float32, bitcast=True))


# --- codes --------------------------------------------------------------------------------------------------


@triton.jit
def least(tensor, ANY: tl.constexpr):
    """Of `tensor_scale`, above which scale ANY block takes no branch, or one whose bf16 is rounded to the nearest."""
    return tensor[5] if ANY else tensor[6]


@triton.jit
def scaling(tensor, ANY: tl.constexpr):
    """Of `tensor_scale`, what assembly takes that finds a block's scale."""
    return tensor[:4] + (least(tensor, ANY), tensor[4])


@triton.jit
def row_codes(w, tensor, number, key, STOCHASTIC: tl.constexpr):
    """(codes of blocks as int64, their scales) of eight tensors of words. tensor: `e2m1.tensor_scale`."""
    ASM: tl.constexpr = ROW_STOCHASTIC if STOCHASTIC else ROW
    REGISTERS: tl.constexpr = "=l,=r,r,r,r,r,r,r,r,r,f,f,f,f,f,r" + (",r,r" if STOCHASTIC else "")
    arguments = w + scaling(tensor, STOCHASTIC)
    if STOCHASTIC:
        arguments = arguments + block_hash(number, key[0], key[1])
    return tl.inline_asm_elementwise(ASM, REGISTERS, arguments, dtype=(tl.int64, tl.int32), is_pure=True, pack=1)


@triton.jit
def scaled_row_codes(w, multiplier, signs, number, key, STOCHASTIC: tl.constexpr):
    """`row_codes` of blocks whose values are multiplied by `multiplier`."""
    ASM: tl.constexpr = ROW_STOCHASTIC_SCALED if STOCHASTIC else ROW_SCALED
    REGISTERS: tl.constexpr = "=l,r,r,r,r,r,r,r,r,f,r" + (",r,r" if STOCHASTIC else "")
    arguments = w + (multiplier, signs)
    if STOCHASTIC:
        arguments = arguments + block_hash(number, key[0], key[1])
    return tl.inline_asm_elementwise(ASM, REGISTERS, arguments, dtype=tl.int64, is_pure=True, pack=1)


@triton.jit
def column_codes(
    w, tensor, number, step, key, TRANSFORMED: tl.constexpr, STOCHASTIC: tl.constexpr, WHOLE: tl.constexpr
):
    """(words of the left columns' codes of rows 0 to 7 and of 8 to 15, those of the right ones', scales, the left ones'
    lowest) of sixteen tensors. number: of the left columns' blocks; step: from there to the right ones'."""
    TO_NEAREST: tl.constexpr = HADAMARD if TRANSFORMED else COLUMN
    OF_GRADIENTS: tl.constexpr = WHOLE_HADAMARD_STOCHASTIC if WHOLE else HADAMARD_STOCHASTIC
    RANDOMLY: tl.constexpr = OF_GRADIENTS if TRANSFORMED else COLUMN_STOCHASTIC
    ASM: tl.constexpr = RANDOMLY if STOCHASTIC else TO_NEAREST
    REGISTERS: tl.constexpr = "=r,=r,=r,=r,=r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,f,f,f,f,f,r" + (
        ",r,r,r,r" if STOCHASTIC else ""
    )
    arguments = w + scaling(tensor, TRANSFORMED or STOCHASTIC)
    if STOCHASTIC:
        arguments = arguments + block_hash(number, key[0], key[1]) + block_hash(number + step, key[0], key[1])
    return tl.inline_asm_elementwise(
        ASM,
        REGISTERS,
        arguments,
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32, tl.int32),
        is_pure=True,
        pack=1,
    )


@triton.jit
def scaled_column_codes(w, multiplier, signs, number, step, key, STOCHASTIC: tl.constexpr):
    """`column_codes`, without the scales, of blocks whose values are multiplied by `multiplier`."""
    ASM: tl.constexpr = COLUMN_STOCHASTIC_SCALED if STOCHASTIC else COLUMN_SCALED
    REGISTERS: tl.constexpr = "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,f,r" + (",r,r,r,r" if STOCHASTIC else "")
    arguments = w + (multiplier, signs)
    if STOCHASTIC:
        arguments = arguments + block_hash(number, key[0], key[1]) + block_hash(number + step, key[0], key[1])
    return tl.inline_asm_elementwise(
        ASM, REGISTERS, arguments, dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1
    )


# --- a tile -------------------------------------------------------------------------------------------------


@triton.jit
def quantize_words(
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
    TRANSFORMED: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Codes and scales of one tile, WHOLE or not. place: (row, column, M, K, row_words, column_words); by_rows, by_columns:
    `e2m1.tensor_scale`; key: the two words of `random`."""
    square = (0, 0)
    if COLUMNWISE or TWO_D:
        w = load_column_blocks(x, place, BLOCK_M, BLOCK_K, WHOLE)
    if TWO_D:
        square = square_scales(w, by_rows if ROWWISE else by_columns, STOCHASTIC, BLOCK_M, BLOCK_K)
    if COLUMNWISE:
        codes, scale = quantize_columns(
            w,
            place,
            by_columns,
            square,
            (key[1], key[0]),
            TWO_D,
            TRANSFORMED,
            STOCHASTIC,
            BLOCK_M,
            BLOCK_K,
            WHOLE,
        )
        store_column_codes(columnwise_data, codes, place, BLOCK_M, BLOCK_K, WHOLE)
        store_column_scales(columnwise_scale_inv, scale, place, BLOCK_M, BLOCK_K, WHOLE)
    if ROWWISE:
        words = load_row_blocks(x, place, BLOCK_M, BLOCK_K, WHOLE)
        quantize_rows(words, data, scale_inv, place, by_rows, square, key, TWO_D, STOCHASTIC, BLOCK_M, BLOCK_K, WHOLE)


@triton.jit
def quantize_strip(
    w,
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
    TWO_D: tl.constexpr,
    TRANSFORMED: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The same by columns, and by rows if ROWWISE, of four whole tiles of 64 x 128 below each other, the first at `place`; w: its
    `load_column_blocks`. A column's scales are written together: bytes cost as much as the sector they lie in."""
    top, column, M, K, row_words, column_words = place
    older = tl.zeros((BLOCK_M // 16, BLOCK_K // 2), tl.int32)
    newer = older
    if ROWWISE:
        address, token = shared_tile(), first_token()
    for i in tl.range(4, num_stages=1):
        tile = (top + i * BLOCK_M, column, M, K, row_words, column_words)
        square = (0, 0)
        if ROWWISE:
            token = write_tile(address, token, w)
        if TWO_D:
            square = square_scales(w, by_rows if ROWWISE else by_columns, STOCHASTIC, BLOCK_M, BLOCK_K)
        codes, scale = quantize_columns(
            w,
            tile,
            by_columns,
            square,
            (key[1], key[0]),
            TWO_D,
            TRANSFORMED,
            STOCHASTIC,
            BLOCK_M,
            BLOCK_K,
            True,
        )
        older, newer = next_pairs(older, newer, scale)
        # The next tile is on its way, into the registers of this one's columns, while the codes are turned and the rows quantized.
        if ROWWISE:
            words, token = read_rows(address, token)
        if i < 3:
            w = load_column_blocks(x, (top + (i + 1) * BLOCK_M, column, M, K), BLOCK_M, BLOCK_K, True)
        store_column_codes(columnwise_data, codes, tile, BLOCK_M, BLOCK_K, True)
        if ROWWISE:
            quantize_rows(words, data, scale_inv, tile, by_rows, square, key, TWO_D, STOCHASTIC, BLOCK_M, BLOCK_K, True)
    store_strip_scales(columnwise_scale_inv, older, newer, top, column, M, BLOCK_M // 16, BLOCK_K // 2)


@triton.jit
def square_scales(w, tensor, STOCHASTIC: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):
    """(scales, multipliers) [BLOCK_M / 16, BLOCK_K / 16] of a tile's blocks of 16x16."""
    amax = square_amax(w, BLOCK_M // 16, BLOCK_K // 16)
    scale, enc = block_scale(amax, tensor)
    multiplier = enc if STOCHASTIC else marked(enc, amax * tensor[0], least(tensor, False))
    return scale.to(tl.uint8, bitcast=True).to(tl.int32), multiplier


@triton.jit
def quantize_rows(
    words,
    data,
    scale_inv,
    place,
    tensor,
    square,
    key,
    TWO_D: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Codes and scales of the tile's rows; square: `square_scales`, used if TWO_D."""
    B: tl.constexpr = BLOCK_K // 16
    row, column, M, K, row_words, _ = place
    rows, blocks = first_rows(BLOCK_M), one_a_thread(B)[None, :]
    row_blocks = row_words // 2
    scale_blocks = (tl.cdiv(K, 16) + 3) // 4 * 4
    corner = data.to(tl.pointer_type(tl.int64)) + (tl.cast(row, tl.int64) * row_blocks + column // 16)
    corner += rows * row_blocks + blocks
    scale_corner = scale_inv + (tl.cast(row, tl.int64) * scale_blocks + column // 16) + (rows * scale_blocks + blocks)
    for q in tl.static_range(4):
        tile_rows, tile_blocks = row + rows + 4 * q, column // 16 + blocks
        number = tile_rows * row_blocks + tile_blocks
        if TWO_D:
            scale, multiplier = of_four_rows(square[0], BLOCK_M, B), of_four_rows(square[1], BLOCK_M, B)
            codes = scaled_row_codes(words[q], multiplier, tensor[4], number, key, STOCHASTIC)
        else:
            codes, scale = row_codes(words[q], tensor, number, key, STOCHASTIC)
        places, scale_places = corner + 4 * q * row_blocks, scale_corner + 4 * q * scale_blocks
        # A byte from each thread: collecting them would take two barriers.
        if WHOLE:
            tl.store(places, codes)
            tl.store(scale_places, scale.to(tl.uint8))
        else:
            tl.store(places, codes, mask=(tile_rows < M) & (tile_blocks < row_blocks))
            scale = tl.where((tile_rows < M) & (tile_blocks < tl.cdiv(K, 16)), scale.to(tl.uint8), 0)
            tl.store(scale_places, scale, mask=(tile_rows < (M + 127) // 128 * 128) & (tile_blocks < scale_blocks))


@triton.jit
def of_four_rows(value, BLOCK_M: tl.constexpr, B: tl.constexpr):
    """[BLOCK_M / 4, B] with every row of value [BLOCK_M / 16, B] four times."""
    return tl.reshape(tl.broadcast_to(value[:, None, :], (BLOCK_M // 16, 4, B)), (BLOCK_M // 4, B))


@triton.jit
def quantize_columns(
    w,
    place,
    tensor,
    square,
    key,
    TWO_D: tl.constexpr,
    TRANSFORMED: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """(codes for `store_column_codes`, scales, two columns' in 16 bits) of the columns of a tile, w of `load_column_blocks`.
    square: `square_scales`, used if TWO_D."""
    G: tl.constexpr = BLOCK_M // 16
    W: tl.constexpr = BLOCK_K // 2
    row, column, column_words = place[0], place[1], place[5]
    step = column_words // 2  # blocks of a column
    number = (column + 2 * tl.arange(0, W)[None, :]) * step + (row // 16 + tl.arange(0, G)[:, None])
    if TWO_D:
        multiplier = of_eight_words(square[1], G, W)
        l0, l1, r0, r1 = scaled_column_codes(w, multiplier, tensor[4], number, step, key, STOCHASTIC)
        scale = of_eight_words(square[0], G, W)
        scale = scale | (scale << 8)
    else:
        l0, l1, r0, r1, scale = column_codes(w, tensor, number, step, key, TRANSFORMED, STOCHASTIC, WHOLE)
    return (l0, l1, r0, r1), scale


@triton.jit
def store_column_codes(
    columnwise_data, codes, place, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, WHOLE: tl.constexpr
):
    """Writes the codes that `quantize_columns` returns of one tile."""
    G: tl.constexpr = BLOCK_M // 16
    row, column, _, K, _, column_words = place
    l0, l1, r0, r1 = codes
    words = tl.join(tl.join(l0, l1), tl.join(r0, r1))  # group, word of two columns, word of eight rows, column
    words = tl.reshape(tl.permute(words, (1, 3, 0, 2)), (BLOCK_K, 2 * G))
    store_words(columnwise_data, words, column, row // 8, column_words, K, BLOCK_K, 2 * G, WHOLE)


@triton.jit
def store_column_scales(scale_inv, scale, place, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, WHOLE: tl.constexpr):
    """Writes the scales that `quantize_columns` returns of one tile."""
    G: tl.constexpr = BLOCK_M // 16
    row, column, M, K = place[0], place[1], place[2], place[3]
    scales = tl.permute(tl.join(scale.to(tl.uint8), (scale >> 8).to(tl.uint8)), (1, 2, 0))
    store_scales(scale_inv, tl.reshape(scales, (BLOCK_K, G)), column, row // 16, K, M, BLOCK_K, G, WHOLE)


@triton.jit
def next_pairs(older, newer, scale):
    """The scales of a strip's last four tiles, two in a word, `scale` (those of two columns, in 16 bits) the last."""
    return ((older >> 16) & 0xFFFF) | (newer << 16), ((newer >> 16) & 0xFFFF) | (scale << 16)


@triton.jit
def store_strip_scales(scale_inv, older, newer, row, column, M, G: tl.constexpr, W: tl.constexpr):
    """Writes the columns' scales of a strip's four tiles, `next_pairs` [G, W] of which are the last two results."""
    stride = M // (64 * G) * (4 * G)  # so that the compiler sees whole strips
    scales = tl.join(four_bytes(older), four_bytes(newer))  # group, word, column of two, tile of two, two of those
    scales = tl.reshape(tl.permute(scales, (1, 3, 4, 2, 0)), (2 * W, 4 * G))
    corner = scale_inv + (tl.cast(column, tl.int64) * stride + row // 16)
    tl.store(corner + (tl.arange(0, 2 * W)[:, None] * stride + tl.arange(0, 4 * G)[None, :]), scales)


@triton.jit
def four_bytes(words):
    """words [G, W] as bytes [G, W, half, byte of a half]."""
    low = tl.join(words.to(tl.uint8), (words >> 16).to(tl.uint8))
    return tl.join(low, tl.join((words >> 8).to(tl.uint8), (words >> 24).to(tl.uint8)))


@triton.jit
def of_eight_words(value, G: tl.constexpr, W: tl.constexpr):
    """[G, W] with every element of value [G, W / 8] eight times."""
    return tl.reshape(tl.broadcast_to(value[:, :, None], (G, W // 8, 8)), (G, W))
