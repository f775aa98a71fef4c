"""The device half of kernels/nvfp4.py: codes, block scales, random bits and the transform, on tiles in registers.

A tile is sixteen tensors [G, BLOCK_K], the i-th holding row 16 g + i of each group g of rows. A thread then holds whole
blocks of columns: their maxima, their transform and their codes are elementwise in sixteen tensors, and only finished
words go through shared memory on their way to the transpose.

Codes without a conversion instruction: e2m1's steps are halves to 2, ones to 4, twos to 6, so with a = |x * enc|

    code = round(min(2a, a + 2, a/2 + 4))      ties to even on every piece, because the offsets are even

and adding 2^23 to each piece before the minimum rounds it: the code is then in the low bits of the sum.
"""

# Tuples of tensors grow in unrolled loops, of which mypy sees one turn.
# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

from te_dynamo.kernels._triton import tl, triton
from te_dynamo.kernels.fp8 import FLOAT32_MAX, load_amax

__all__: list[str] = []

TENSOR_MAX: tl.constexpr = tl.constexpr(2688.0)
SMALL: tl.constexpr = tl.constexpr(2.0**-60)
LIFT: tl.constexpr = tl.constexpr(2.0**64)
SIXTH: tl.constexpr = tl.constexpr(1 / 6)
HADAMARD_NEGATIVE: tl.constexpr = tl.constexpr(0xD7E8)  # bit i: the i-th of HADAMARD_SIGNS is -1

# --- scales -------------------------------------------------------------------------------------------------


@triton.jit
def load_tensor_scale(partials, amax, PARTIALS: tl.constexpr):
    """What `block_scale` reads of the tensor that `partials` describe; one program also stores its amax."""
    value = load_amax(partials, PARTIALS)
    value = tl.where(value == value, value, float("nan"))  # one NaN of all
    if tl.program_id(0) == 0:
        tl.store(amax, value)
    scale = tl.div_rn(tl.full((), TENSOR_MAX, tl.float32), value)
    scale = tl.where(scale > FLOAT32_MAX, FLOAT32_MAX, scale)
    scale = tl.where((value == 0.0) | (value > FLOAT32_MAX), 1.0, scale)
    inverse = tl.div_rn(tl.full((), 1.0, tl.float32), scale)
    lift = tl.where(inverse < SMALL, LIFT, 1.0)
    most = tl.where(value == value, FLOAT32_MAX, 0.0)
    return scale * SIXTH, inverse, lift, most


@triton.jit
def block_scale(block_amax, sixth_scale, inverse_scale, lift, most):
    """(the e4m3 scales, enc) of blocks with those amaxes.

    The reciprocal is a guess and one step of Newton's, which rounds correctly where neither it nor its argument is
    subnormal: `lift`, a power of two, sees to that. A division by 0 gives NaN, of which the minimum makes `most`.
    """
    scale = (block_amax * sixth_scale).to(tl.float8e4nv)  # the conversion saturates
    divisor = scale.to(tl.float32) * inverse_scale * lift
    guess = tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [divisor], dtype=tl.float32, is_pure=True, pack=1
    )
    inverse = tl.fma(tl.fma(-divisor, guess, 1.0), guess, guess)
    return scale, tl.minimum(inverse * lift, most)


# --- codes --------------------------------------------------------------------------------------------------

# Of v = |x * enc|: the three pieces, rounded, and the least of them as an integer, which orders them as the floats.
_NEAREST = """
    fma.rn.f32 t, v, 0f40000000, 0f4B000000;  mov.b32 halves, t;  // 2v + 2^23
    add.rn.f32 t, v, 0f4B000002;              mov.b32 ones, t;    // v + 2 + 2^23
    fma.rn.f32 t, v, 0f3F000000, 0f4B000004;  mov.b32 twos, t;    // v/2 + 4 + 2^23
    min.s32 halves, halves, ones;
    min.s32 halves, halves, twos;
    shl.b32 word, word, 4;
    add.s32 word, word, halves;
"""
# start = 64 + u: at 64 fp32 counts 2^-17, so truncation there keeps all of u's bits and the floor is a shift.
_STOCHASTIC = """
    fma.rz.f32 t, v, 0f40000000, start;  mov.b32 halves, t;
    add.rn.f32 t, start, 0f40000000;  add.rz.f32 t, v, t;              mov.b32 ones, t;
    add.rn.f32 t, start, 0f40800000;  fma.rz.f32 t, v, 0f3F000000, t;  mov.b32 twos, t;
    min.s32 halves, halves, ones;
    min.s32 halves, halves, twos;
    shr.u32 halves, halves, 17;
    shl.b32 word, word, 4;
    add.s32 word, word, halves;
"""


# The 32 bits of a byte's two elements, by the mixing of `random_bits_reference`; $9 is the word's number.
_HASH = """
    mad.lo.u32 hash, $9, {four_words}, $10;  add.u32 hash, hash, {byte};
    shr.u32 mixed, hash, 16;  xor.b32 hash, hash, mixed;  mul.lo.u32 hash, hash, 0x7FEB352D;
    shr.u32 mixed, hash, 15;  xor.b32 hash, hash, mixed;  xor.b32 hash, hash, $11;  mul.lo.u32 hash, hash, 0x846CA68B;
    shr.u32 mixed, hash, 16;  xor.b32 hash, hash, mixed;
"""
_HIGH_START = (
    "shr.u32 mixed, hash, 15; and.b32 mixed, mixed, 0x1FFFE; or.b32 mixed, mixed, 0x42800001; mov.b32 start, mixed;"
)
_LOW_START = (
    "shl.b32 mixed, hash, 1; and.b32 mixed, mixed, 0x1FFFE; or.b32 mixed, mixed, 0x42800001; mov.b32 start, mixed;"
)
HASH_STEP = 0x9E3779B1


def word_assembly(stochastic: bool) -> str:
    """PTX of a word, $0 = the codes of $1 to $8, the first in the low four bits.

    stochastic: $9 is the word's number in its buffer, $10 and $11 the key.
    """
    lines = [".reg .f32 v, t, start; .reg .b32 word, signs, halves, ones, twos, hash, mixed;"]
    lines += ["mov.b32 word, 0; mov.b32 signs, 0;"]
    for element in range(7, -1, -1):
        # Four bits move into `signs`, the first of them the sign; a NaN that the hardware makes is positive.
        lines += [f"mov.b32 ones, ${1 + element};", "shf.l.wrap.b32 signs, ones, signs, 4;"]
        lines += [f"abs.f32 v, ${1 + element};", "min.f32 v, v, 0f40C00000;"]  # 6, for NaN too
        if stochastic and element % 2:
            byte = HASH_STEP * (element // 2) % 2**32
            lines += [_HASH.format(four_words=HASH_STEP * 4 % 2**32, byte=byte)]
        lines += [_HIGH_START if element % 2 else _LOW_START, _STOCHASTIC] if stochastic else [_NEAREST]
    # What the codes stand on in every piece has been added into the word eight times, four bits apart.
    base = 0x42800000 >> 17 if stochastic else 0x4B000000
    surplus = sum(base << 4 * element for element in range(8)) % 2**32
    lines += [f"sub.u32 word, word, {surplus};", "and.b32 signs, signs, 0x88888888;", "or.b32 $0, word, signs;"]
    return "{" + "\n".join(lines) + "}"


NEAREST_WORD: tl.constexpr = tl.constexpr(word_assembly(False))
STOCHASTIC_WORD: tl.constexpr = tl.constexpr(word_assembly(True))


@triton.jit
def pack_word(v0, v1, v2, v3, v4, v5, v6, v7, number, first, second, STOCHASTIC: tl.constexpr):
    """int32 words of the codes of eight tensors, the first in the low four bits.

    number: the words' numbers in their buffer; first, second: the key's words; both only if STOCHASTIC.
    """
    if STOCHASTIC:
        return tl.inline_asm_elementwise(
            STOCHASTIC_WORD,
            "=r,f,f,f,f,f,f,f,f,r,r,r",
            [v0, v1, v2, v3, v4, v5, v6, v7, number, first, second],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    return tl.inline_asm_elementwise(
        NEAREST_WORD,
        "=r,f,f,f,f,f,f,f,f",
        [v0, v1, v2, v3, v4, v5, v6, v7],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def pack_rows(value, number, first, second, STOCHASTIC: tl.constexpr, A: tl.constexpr, B: tl.constexpr):
    """`pack_word` of neighbours: value [A, B, 8] -> [A, B]."""
    even, odd = tl.split(tl.reshape(value, (A, B, 2, 2, 2)))
    v04, v26 = tl.split(even)
    v15, v37 = tl.split(odd)
    v0, v4 = tl.split(v04)
    v1, v5 = tl.split(v15)
    v2, v6 = tl.split(v26)
    v3, v7 = tl.split(v37)
    return pack_word(v0, v1, v2, v3, v4, v5, v6, v7, number, first, second, STOCHASTIC)


@triton.jit
def pack_column(x, enc, FIRST: tl.constexpr, number, first, second, STOCHASTIC: tl.constexpr):
    """`pack_word` of x[FIRST] * enc and the seven after it."""
    return pack_word(
        x[FIRST] * enc,
        x[FIRST + 1] * enc,
        x[FIRST + 2] * enc,
        x[FIRST + 3] * enc,
        x[FIRST + 4] * enc,
        x[FIRST + 5] * enc,
        x[FIRST + 6] * enc,
        x[FIRST + 7] * enc,
        number,
        first,
        second,
        STOCHASTIC,
    )


# --- sixteen tensors ----------------------------------------------------------------------------------------


@triton.jit
def hadamard(x):
    """The sixteen tensors x in fp32 times diag(signs) H16 / 4: `hadamard_reference`, addition by addition."""
    y = ()
    for i in tl.static_range(16):
        y += (-x[i] if (HADAMARD_NEGATIVE >> i) & 1 else x[i],)
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
