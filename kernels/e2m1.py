"""The device half of kernels/nvfp4.py: codes, block scales, random bits and the transform, on tiles in registers.

A tile is [16, G, BLOCK_K]: rows of 16 G in an order that puts the 16 rows of a block in the first dimension. A thread
then holds 16 rows of a few columns, and whole blocks of a column stay inside it: no block of columns crosses a
thread, and the transpose of the packed words is all that goes through shared memory.

Codes without a conversion instruction: e2m1's steps are halves to 2, ones to 4, twos to 6, so with a = |x * enc|

    code = round(min(2a, a + 2, a/2 + 4))      ties to even on every piece, because the offsets are even

and adding 2^23 to each piece before the minimum rounds it: the code is then in the low bits of the sum.
"""

from __future__ import annotations

from te_dynamo.kernels._triton import tl, triton
from te_dynamo.kernels.fp8 import FLOAT32_MAX, load_amax

__all__: list[str] = []

TENSOR_MAX: tl.constexpr = tl.constexpr(2688.0)
SMALLEST_IN_RANGE: tl.constexpr = tl.constexpr(2.0**-117)  # times the least scale, 2^-9: the least normal fp32
SIXTH: tl.constexpr = tl.constexpr(1 / 6)
HADAMARD_NEGATIVE: tl.constexpr = tl.constexpr(0xD7E8)  # bit i: the i-th of HADAMARD_SIGNS is -1

# --- scales -------------------------------------------------------------------------------------------------


@triton.jit
def reciprocal_rn(x):
    """1 / x, correctly rounded."""
    return tl.inline_asm_elementwise("rcp.rn.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def reciprocal_in_range(x):
    """1 / x, correctly rounded, for x from 2^-126 to 2^126: what `reciprocal_rn` does there, without its branch."""
    guess = tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )
    return tl.fma(tl.fma(-x, guess, 1.0), guess, guess)


@triton.jit
def load_tensor_scale(partials, amax, PARTIALS: tl.constexpr):
    """(S/6, 1/S) of the tensor that `partials` describe; one program also stores its amax."""
    value = load_amax(partials, PARTIALS)
    if tl.program_id(0) == 0:
        tl.store(amax, value)
    scale = tl.div_rn(tl.full((), TENSOR_MAX, tl.float32), value)
    scale = tl.where(scale > FLOAT32_MAX, FLOAT32_MAX, scale)
    scale = tl.where((value == 0.0) | (value > FLOAT32_MAX), 1.0, scale)
    return scale * SIXTH, tl.div_rn(tl.full((), 1.0, tl.float32), scale)


@triton.jit
def block_scale(block_amax, sixth_scale, inverse_scale):
    """(the e4m3 scales, enc) of blocks with those amaxes; enc is 0 where the tensor's amax is NaN."""
    scale = block_amax * sixth_scale
    scale = tl.where(scale > 448.0, 448.0, scale).to(tl.float8e4nv)
    divisor = scale.to(tl.float32) * inverse_scale
    if inverse_scale >= SMALLEST_IN_RANGE:
        enc = tl.where(divisor == 0.0, FLOAT32_MAX, reciprocal_in_range(divisor))
    else:
        enc = tl.minimum(tl.maximum(reciprocal_rn(divisor), 0.0), FLOAT32_MAX)
    return scale, enc


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
_HIGH_START = "shr.u32 mixed, hash, 15; and.b32 mixed, mixed, 0x1FFFE; or.b32 mixed, mixed, 0x42800001; mov.b32 start, mixed;"
_LOW_START = "shl.b32 mixed, hash, 1; and.b32 mixed, mixed, 0x1FFFE; or.b32 mixed, mixed, 0x42800001; mov.b32 start, mixed;"
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
def split_eight(x, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr):
    """The eight [A, B, C] parts of x [A, B, C, 8]."""
    even, odd = tl.split(tl.reshape(x, (A, B, C, 2, 2, 2)))
    x04, x26 = tl.split(even)
    x15, x37 = tl.split(odd)
    x0, x4 = tl.split(x04)
    x1, x5 = tl.split(x15)
    x2, x6 = tl.split(x26)
    x3, x7 = tl.split(x37)
    return x0, x1, x2, x3, x4, x5, x6, x7


@triton.jit
def pack_words(value, number, first, second, STOCHASTIC: tl.constexpr):
    """int32 [A, B, C] of the codes of value [A, B, C, 8]; if STOCHASTIC, number [A, B, C] and the key's two words."""
    v0, v1, v2, v3, v4, v5, v6, v7 = split_eight(value, number.shape[0], number.shape[1], number.shape[2])
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


# --- transform ----------------------------------------------------------------------------------------------


@triton.jit
def hadamard_stage(x, A: tl.constexpr, B: tl.constexpr):
    """Sums of neighbours in the first half of the last dimension of x [A, B, 16], differences in the second."""
    even, odd = tl.split(tl.reshape(x, (A, B, 8, 2)))
    return tl.reshape(tl.permute(tl.join(even + odd, even - odd), (0, 1, 3, 2)), (A, B, 16))


@triton.jit
def hadamard(x, A: tl.constexpr, B: tl.constexpr):
    """x [A, B, 16] in fp32, every 16 times diag(signs) H16 / 4: `hadamard_reference`, addition by addition."""
    index = tl.arange(0, 16)[None, None, :]
    x = tl.where(((HADAMARD_NEGATIVE >> index) & 1) == 1, -x, x)
    x = hadamard_stage(hadamard_stage(x, A, B), A, B)
    return hadamard_stage(hadamard_stage(x, A, B), A, B) * 0.25
