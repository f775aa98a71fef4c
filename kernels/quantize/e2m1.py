"""The device half of kernels/quantize/nvfp4.py: block scales, random bits and the transform, on tiles of fp32 in registers.

A tile is sixteen tensors [G, BLOCK_K], the i-th holding row 16 g + i of each group g of rows. A thread then holds whole
blocks of columns: their maxima, their transform and their codes are elementwise in sixteen tensors, and only finished
words go through shared memory on their way to the transpose. bf16 goes another way: kernels/quantize/nvfp4_words.py.
"""

# Tuples of tensors grow in unrolled loops, of which mypy sees one turn.
# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

from te_dynamo.kernels.quantize.e2m1_assembly import HADAMARD_NEGATIVE as NEGATIVE
from te_dynamo.kernels.quantize.e2m1_assembly import word_of_values
from te_dynamo.kernels.runtime._triton import tl, triton
from te_dynamo.kernels.tiles.fp8 import FLOAT32_MAX, load_partials

__all__: list[str] = []

UNLUCKY: tl.constexpr = tl.constexpr((12, 19, 40, 52, 70, 82, 124))
"""Mantissas of the amaxes of bf16 in whose tensors the fewest instructions may round a value otherwise (`least_of_bf16`)."""

TENSOR_MAX: tl.constexpr = tl.constexpr(2688.0)
SMALL: tl.constexpr = tl.constexpr(2.0**-60)
LEAST: tl.constexpr = tl.constexpr(3.5 * 2.0**-9)
"""Above it a scale is four steps of e4m3 or more: rounded, it leaves a block's largest value times enc below 7."""
LIFT: tl.constexpr = tl.constexpr(2.0**64)
SIXTH: tl.constexpr = tl.constexpr(1 / 6)
HADAMARD_NEGATIVE: tl.constexpr = tl.constexpr(NEGATIVE)
SIGN_BITS: tl.constexpr = tl.constexpr(0x88888888 - 2**32)
NEAREST_WORD: tl.constexpr = tl.constexpr(word_of_values(False, 0))
STOCHASTIC_WORD: tl.constexpr = tl.constexpr(word_of_values(True, 0))
SECOND_STOCHASTIC_WORD: tl.constexpr = tl.constexpr(word_of_values(True, 1))

# --- scales -------------------------------------------------------------------------------------------------


@triton.jit
def load_one_or_two(first, second, TWO: tl.constexpr, PARTIALS: tl.constexpr):
    """What `amaxes` reduces: `load_partials` of one tensor, or of two."""
    bits = load_partials(first, PARTIALS)
    if TWO:
        bits = tl.join(bits, load_partials(second, PARTIALS))
    return bits


@triton.jit
def amaxes(bits, TWO: tl.constexpr):
    """(amax, amax) of one tensor, or of two, found together: a wait for other warps costs a program as much as blocks do."""
    most = tl.max(bits, axis=0).to(tl.float32, bitcast=True)
    if TWO:
        first, second = tl.split(most)
    else:
        first, second = most, most
    return first, second


@triton.jit
def tensor_scale(value, amax):
    """(S / 6, 1 / S, lift, most: what `block_scale` reads, the sign bits that its words keep, none where amax is NaN, LEAST or where
    lift is to be done or that cannot be said infinity, the same for blocks of bf16: `least_of_bf16`) of a tensor of that amax, which
    one program also stores."""
    value = tl.where(value == value, value, float("nan"))  # one NaN of all
    if tl.program_id(0) == 0:
        tl.store(amax, value)
    scale = tl.div_rn(tl.full((), TENSOR_MAX, tl.float32), value)
    scale = tl.where(scale > FLOAT32_MAX, FLOAT32_MAX, scale)
    scale = tl.where((value == 0.0) | (value > FLOAT32_MAX), 1.0, scale)
    inverse = tl.div_rn(tl.full((), 1.0, tl.float32), scale)
    lift = tl.where(inverse < SMALL, LIFT, 1.0)
    most = tl.where(value == value, FLOAT32_MAX, 0.0)
    signs = tl.where(value == value, tl.full((), SIGN_BITS, tl.int32), 0)
    usual = (inverse > SMALL) & (inverse < 1 / SMALL) & (value <= FLOAT32_MAX)  # an infinite amax has an S of 1
    least = tl.where(usual, LEAST, float("inf"))
    return scale * SIXTH, inverse, lift, most, signs, least, least_of_bf16(value, least)


@triton.jit
def least_of_bf16(amax, least):
    """`least`, above which blocks of bf16 are rounded by the fewest instructions, or infinity in a tensor, of that amax, whose
    values these may round otherwise: kernels/quantize/e2m1_assembly.py.

    That is where x * enc / 4 is above 5/4 by more than half a step of fp32, but no more than a step. All scales of a tensor make eight
    significands of enc, as long as nothing is subnormal, and these depend on that of amax alone, one of 128.
    """
    mantissa = (amax.to(tl.int32, bitcast=True) >> 16) & 0x7F
    unlucky = mantissa == UNLUCKY[0]
    for i in tl.static_range(1, 7):
        unlucky |= mantissa == UNLUCKY[i]
    return tl.where(unlucky, float("inf"), least)


@triton.jit
def block_scale(block_amax, tensor):
    """(the e4m3 scales, enc) of blocks with those amaxes, of the tensor that `tensor_scale` describes.

    The reciprocal is a guess and one step of Newton's, which rounds correctly where neither it nor its argument is
    subnormal: `lift`, a power of two, sees to that. A division by 0 gives NaN, of which the minimum makes `most`.
    """
    sixth, inverse, lift, most, _, _, _ = tensor
    scale = (block_amax * sixth).to(tl.float8e4nv)  # the conversion saturates
    divisor = scale.to(tl.float32) * inverse * lift
    guess = tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [divisor], dtype=tl.float32, is_pure=True, pack=1
    )
    quotient = tl.fma(tl.fma(-divisor, guess, 1.0), guess, guess)
    return scale, tl.minimum(quotient * lift, most)


# --- codes --------------------------------------------------------------------------------------------------


@triton.jit
def block_hash(number, first, second):
    """The two random words of the block with that number, of the key (first, second): `block_hashes` of kernels/quantize/nvfp4.py."""
    h = number.to(tl.uint32) * 0x9E3779B1 + first.to(tl.uint32, bitcast=True)
    h = (h ^ (h >> 16)) * 0x7FEB352D
    h = h ^ (h >> 15) ^ second.to(tl.uint32, bitcast=True)
    factor = tl.full((), 0x846CA68B, tl.uint32)
    return (h * factor).to(tl.int32, bitcast=True), tl.umulhi(h, factor).to(tl.int32, bitcast=True)


@triton.jit
def marked(enc, scale, least):
    """enc, negative where the block's scale, before it is rounded, is not above `least`, or where a NaN takes all codes."""
    return tl.where((scale > least) & (enc > 0.0), enc, enc * -1.0)  # -0 of 0, as 0 - 0 is not


@triton.jit
def pack_word(v0, v1, v2, v3, v4, v5, v6, v7, multiplier, signs, seed, HALF: tl.constexpr, STOCHASTIC: tl.constexpr):
    """int32 words of the codes of eight tensors times multiplier, the first in the low four bits.

    signs: the sign bits that are kept; seed: `block_hash` of the block whose first or second HALF they are, if STOCHASTIC;
    otherwise nothing.
    """
    RANDOMLY: tl.constexpr = SECOND_STOCHASTIC_WORD if HALF else STOCHASTIC_WORD
    ASM: tl.constexpr = RANDOMLY if STOCHASTIC else NEAREST_WORD
    REGISTERS: tl.constexpr = "=r,f,f,f,f,f,f,f,f,f,r" + (",r,r" if STOCHASTIC else "")
    arguments = (v0, v1, v2, v3, v4, v5, v6, v7, multiplier, signs) + seed
    return tl.inline_asm_elementwise(ASM, REGISTERS, arguments, dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def eighths(value, A: tl.constexpr, B: tl.constexpr):
    """value [A, 8 B] as eight tensors [A, B] of every eighth column."""
    even, odd = tl.split(tl.reshape(value, (A, B, 2, 2, 2)))
    v04, v26 = tl.split(even)
    v15, v37 = tl.split(odd)
    v0, v4 = tl.split(v04)
    v1, v5 = tl.split(v15)
    v2, v6 = tl.split(v26)
    v3, v7 = tl.split(v37)
    return (v0, v1, v2, v3, v4, v5, v6, v7)


@triton.jit
def pack_row(x, multiplier, signs, number, first, second, STOCHASTIC: tl.constexpr, G: tl.constexpr, B: tl.constexpr):
    """The words [G, 2 B] of x [G, 16 B] times multiplier [G, B]; number [G, B]: of its blocks."""
    seed = ()
    if STOCHASTIC:
        seed = block_hash(number, first, second)
    low, high = tl.split(tl.permute(tl.reshape(x, (G, B, 2, 8)), (0, 1, 3, 2)))
    low, high = eighths(tl.reshape(low, (G, 8 * B)), G, B), eighths(tl.reshape(high, (G, 8 * B)), G, B)
    return tl.reshape(
        tl.join(
            pack_word(*low, multiplier, signs, seed, 0, STOCHASTIC),
            pack_word(*high, multiplier, signs, seed, 1, STOCHASTIC),
        ),
        (G, 2 * B),
    )


@triton.jit
def pack_columns(x, multiplier, signs, number, first, second, STOCHASTIC: tl.constexpr):
    """(words of the first eight of sixteen tensors times multiplier, words of the others); number: of their blocks."""
    seed = ()
    if STOCHASTIC:
        seed = block_hash(number, first, second)
    return (
        pack_word(x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7], multiplier, signs, seed, 0, STOCHASTIC),
        pack_word(x[8], x[9], x[10], x[11], x[12], x[13], x[14], x[15], multiplier, signs, seed, 1, STOCHASTIC),
    )


# --- sixteen tensors ----------------------------------------------------------------------------------------


@triton.jit
def hadamard(x):
    """The sixteen tensors x in fp32 times diag(signs) H16 / 4: `hadamard_reference`, addition by addition."""
    y = ()
    for i in tl.static_range(16):
        # Triton's -x is 0 - x, which makes +0 of +0: the transform's zeros would have other signs.
        y += (x[i] * -1.0 if (HADAMARD_NEGATIVE >> i) & 1 else x[i],)
    for _ in tl.static_range(4):
        sums, differences = (), ()
        for i in tl.static_range(0, 16, 2):
            sums += (y[i] + y[i + 1],)
            differences += (y[i] - y[i + 1],)
        y = sums + differences
    z = ()
    for i in tl.static_range(16):
        z += (y[i] * 0.25,)
    return z


@triton.jit
def magnitude(x):
    """The largest |x|, element by element, of sixteen tensors; NaN is dropped."""
    most = tl.abs(x[0])
    for i in tl.static_range(1, 16):
        most = tl.maximum(most, tl.abs(x[i]))
    return most


@triton.jit
def interleave(x, A: tl.constexpr, B: tl.constexpr):
    """[16 A, B] from sixteen tensors [A, B]: row 16 a + i is row a of x[i]."""
    # The pair that differs in the highest bit of i is joined first: the last dimension varies fastest.
    eight = ()
    for i in tl.static_range(8):
        eight += (tl.join(x[i], x[i + 8]),)
    four = ()
    for i in tl.static_range(4):
        four += (tl.join(eight[i], eight[i + 4]),)
    joined = tl.join(tl.join(four[0], four[2]), tl.join(four[1], four[3]))
    return tl.reshape(tl.permute(joined, (0, 2, 3, 4, 5, 1)), (16 * A, B))


# --- store --------------------------------------------------------------------------------------------------


@triton.jit
def one_a_thread(N: tl.constexpr):
    """0 to N - 1, as offsets of a store that leaves its values in the threads that have them.

    The compiler takes them for pairs that are not aligned, so that wider stores do not pay: it would move the values through
    shared memory first. Of values that it takes for scattered it would give neighbouring rows to neighbouring threads.
    """
    return tl.multiple_of(tl.max_contiguous(tl.arange(0, N), 2), 1)


@triton.jit
def store_words(
    data, words, row, column, row_words, M, BLOCK_M: tl.constexpr, BLOCK_W: tl.constexpr, WHOLE: tl.constexpr
):
    """Writes words [BLOCK_M, BLOCK_W] at that row and word of `data`, read as int32 [M, row_words]; WHOLE: all lie inside."""
    rows, columns = row + tl.arange(0, BLOCK_M), column + tl.arange(0, BLOCK_W)
    corner = row.to(tl.int64) * row_words + column
    offsets = corner + (tl.arange(0, BLOCK_M)[:, None] * row_words + tl.arange(0, BLOCK_W)[None, :])
    if WHOLE:
        tl.store(data.to(tl.pointer_type(tl.int32)) + offsets, words)
    else:
        mask = (rows < M)[:, None] & (columns < row_words)[None, :]
        tl.store(data.to(tl.pointer_type(tl.int32)) + offsets, words, mask=mask)


@triton.jit
def store_scales(
    scale_inv,
    scale,
    row,
    block,
    M,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_B: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Writes scale [BLOCK_M, BLOCK_B] at that row and block of scale_inv [M^128, ceil(K/16)^4], zero past M and K.

    WHOLE: all lie inside.
    """
    blocks = tl.cdiv(K, 16)
    padded_blocks, padded_rows = (blocks + 3) // 4 * 4, (M + 127) // 128 * 128
    rows, columns = row + tl.arange(0, BLOCK_M), block + tl.arange(0, BLOCK_B)
    corner = row.to(tl.int64) * padded_blocks + block
    offsets = corner + (tl.arange(0, BLOCK_M)[:, None] * padded_blocks + tl.arange(0, BLOCK_B)[None, :])
    if WHOLE:
        tl.store(scale_inv + offsets, scale)
    else:
        scale = tl.where((rows < M)[:, None] & (columns < blocks)[None, :], scale, 0)
        mask = (rows < padded_rows)[:, None] & (columns < padded_blocks)[None, :]
        tl.store(scale_inv + offsets, scale, mask=mask)
