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
SIXTH: tl.constexpr = tl.constexpr(1 / 6)
ROUNDER: tl.constexpr = tl.constexpr(8388608.0)  # 2^23: fp32 counts ones there
CODES_OF_ROUNDERS: tl.constexpr = tl.constexpr(-0x05000000)  # eight patterns of 2^23, four bits apart, summed mod 2^32
SIGN_BITS: tl.constexpr = tl.constexpr(-0x77777778)  # 0x88888888
HADAMARD_NEGATIVE: tl.constexpr = tl.constexpr(0xD7E8)  # bit i: the i-th of HADAMARD_SIGNS is -1

# --- scales -------------------------------------------------------------------------------------------------


@triton.jit
def reciprocal_rn(x):
    """1 / x, correctly rounded."""
    return tl.inline_asm_elementwise("rcp.rn.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


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
    enc = reciprocal_rn(scale.to(tl.float32) * inverse_scale)
    return scale, tl.minimum(tl.maximum(enc, 0.0), FLOAT32_MAX)


# --- codes --------------------------------------------------------------------------------------------------


@triton.jit
def add_code(word, value):
    """word * 16 + the code of |value| + the bits of 2^23. A NaN gives the code of 6: the minimum drops it."""
    magnitude = tl.minimum(tl.abs(value), 6.0)
    halves = (magnitude * 2.0 + ROUNDER).to(tl.int32, bitcast=True)
    ones = (magnitude + (ROUNDER + 2.0)).to(tl.int32, bitcast=True)
    twos = (magnitude * 0.5 + (ROUNDER + 4.0)).to(tl.int32, bitcast=True)
    return (word << 4) + tl.minimum(tl.minimum(halves, ones), twos)


@triton.jit
def fma_towards_zero(a, b, c):
    """a * b + c, truncated."""
    return tl.inline_asm_elementwise(
        "fma.rz.f32 $0, $1, $2, $3;", "=f,f,f,f", [a, b, c], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def add_stochastic_code(word, value, bits):
    """word * 16 + the code of |value| rounded by 16 random bits.

    floor(steps + (bits + 1/2) / 65536), at 64, where fp32 counts 2^-17: truncation there is the floor.
    """
    magnitude = tl.minimum(tl.abs(value), 6.0)
    start = ((bits << 1) + 0x42800001).to(tl.float32, bitcast=True)
    two, half = tl.full((), 2.0, tl.float32), tl.full((), 0.5, tl.float32)
    one = tl.full((), 1.0, tl.float32)
    code = tl.minimum(fma_towards_zero(magnitude, two, start), fma_towards_zero(magnitude, one, start + 2.0))
    code = tl.minimum(code, fma_towards_zero(magnitude, half, start + 4.0))
    return (word << 4) | ((code.to(tl.int32, bitcast=True) >> 17) & 7)


@triton.jit
def add_sign(signs, value):
    """signs * 16 + the four high bits of `value`, the first of which is its sign. The hardware's own NaN is positive."""
    return (signs << 4) | (value.to(tl.uint32, bitcast=True) >> 28)


@triton.jit
def split_eight(x, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr):
    """The eight [A, B, C] parts of x [A, B, C, 8], which lie in registers of one thread."""
    even, odd = tl.split(tl.reshape(x, (A, B, C, 2, 2, 2)))
    x04, x26 = tl.split(even)
    x15, x37 = tl.split(odd)
    x0, x4 = tl.split(x04)
    x1, x5 = tl.split(x15)
    x2, x6 = tl.split(x26)
    x3, x7 = tl.split(x37)
    return x0, x1, x2, x3, x4, x5, x6, x7


@triton.jit
def pack_words(value, bits, STOCHASTIC: tl.constexpr, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr):
    """int32 [A, B, C] of the eight codes of value [A, B, C, 8], the first in the low four bits.

    bits [A, B, C, 8]: 16 random bits each; any tensor unless STOCHASTIC.
    """
    v0, v1, v2, v3, v4, v5, v6, v7 = split_eight(value, A, B, C)
    signs = v7.to(tl.uint32, bitcast=True) >> 28
    signs = add_sign(add_sign(add_sign(add_sign(signs, v6), v5), v4), v3)
    signs = add_sign(add_sign(add_sign(signs, v2), v1), v0).to(tl.int32, bitcast=True) & SIGN_BITS
    word = tl.zeros((A, B, C), tl.int32)
    if STOCHASTIC:
        r0, r1, r2, r3, r4, r5, r6, r7 = split_eight(bits, A, B, C)
        word = add_stochastic_code(add_stochastic_code(word, v7, r7), v6, r6)
        word = add_stochastic_code(add_stochastic_code(word, v5, r5), v4, r4)
        word = add_stochastic_code(add_stochastic_code(word, v3, r3), v2, r2)
        word = add_stochastic_code(add_stochastic_code(word, v1, r1), v0, r0)
    else:
        word = add_code(add_code(add_code(add_code(word, v7), v6), v5), v4)
        word = add_code(add_code(add_code(add_code(word, v3), v2), v1), v0) - CODES_OF_ROUNDERS
    return word | signs


# --- random bits, transform ---------------------------------------------------------------------------------


@triton.jit
def random_bits(random, number):
    """32 random bits for the elements of those numbers (uint32); see `random_bits` of kernels/nvfp4.py."""
    first = tl.load(random).to(tl.uint32, bitcast=True)
    second = tl.load(random + 1).to(tl.uint32, bitcast=True)
    h = number * 0x9E3779B1 + first
    h = (h ^ (h >> 16)) * 0x7FEB352D
    h = (h ^ (h >> 15) ^ second) * 0x846CA68B
    return h ^ (h >> 16)


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
