"""The Triton kernels of kernels/quantize/nvfp4.py, which says what they compute and launches them.

All arithmetic is fp32. Columns are the rows of the transposed tile, so that both usages are one function.
"""

from __future__ import annotations

from te_dynamo.kernels.layouts.nvfp4 import HADAMARD_SIGNS
from te_dynamo.kernels.layouts.tiled_scales import scale_offsets
from te_dynamo.kernels.runtime._triton import tl, triton
from te_dynamo.kernels.runtime.writes import updates, writes
from te_dynamo.kernels.tiles.fp8 import (
    FLOAT32_MAX,
    abs_bits,
    load_amax,
    load_tile,
    mul_rn,
    store_partial_amax,
    store_tile,
    tile_from_the_end,
    tile_mask,
    tile_offsets,
    tile_origin,
    tile_total,
)

LOW_ROTATIONS, HIGH_ROTATIONS = (0, 4, 13, 23), (0, 7)
"""By how much the two words of a block's hash are rotated to the left: the xor of one of each holds nine random bits in either half.
Of 64 independent bits, these are sixteen numbers of which any three are independent."""

# The same as numbers, of which a kernel can take parts by shifts: a bit for each negative sign, a byte for each rotation.
_NEGATIVE: tl.constexpr = tl.constexpr(sum((sign < 0) << i for i, sign in enumerate(HADAMARD_SIGNS)))
_LOW: tl.constexpr = tl.constexpr(sum(by << 8 * i for i, by in enumerate(LOW_ROTATIONS)))
_HIGH: tl.constexpr = tl.constexpr(sum(by << 8 * i for i, by in enumerate(HIGH_ROTATIONS)))

TENSOR_MAX: tl.constexpr = tl.constexpr(2688.0)
SIXTH: tl.constexpr = tl.constexpr(1 / 6)

# --- transform ----------------------------------------------------------------------------------------------


@triton.jit
def hadamard(blocks):
    """blocks [R, B, 16] times diag(HADAMARD_SIGNS) H16 / 4: `hadamard_reference`, addition by addition."""
    R: tl.constexpr = blocks.shape[0]
    B: tl.constexpr = blocks.shape[1]
    negative = (tl.full((), _NEGATIVE, tl.int32) >> tl.arange(0, 16)) & 1
    blocks = tl.where(negative[None, None, :] == 1, blocks * -1.0, blocks)  # -x would be 0 - x, which is +0 of +0
    for _ in tl.static_range(4):
        even, odd = tl.split(tl.reshape(blocks, (R, B, 8, 2)))
        halves = tl.join(even + odd, even - odd)
        blocks = tl.reshape(tl.permute(halves, (0, 1, 3, 2)), (R, B, 16))
    return blocks * 0.25


@writes("columnwise_partials", partials="ROWWISE")
@triton.jit
def hadamard_amax_kernel(
    x, partials, columnwise_partials, M, K, ROWWISE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr
):
    """Partial amaxes of x's transformed columns and, if ROWWISE, of x itself, one of each a program."""
    G: tl.constexpr = BLOCK_M // 16
    bits, columnwise_bits = tl.zeros((BLOCK_K, G), tl.int32), tl.zeros((BLOCK_K, G), tl.int32)
    tiles = tile_total(M, K, BLOCK_M, BLOCK_K)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=1):
        row, column = tile_origin(tile, K, BLOCK_M, BLOCK_K)
        value = load_tile(x, row, column, K, M, K, BLOCK_M, BLOCK_K)
        blocks = tl.reshape(tl.trans(value), (BLOCK_K, G, 16))
        if ROWWISE:
            bits = tl.maximum(bits, tl.max(abs_bits(blocks), axis=2))
        columnwise_bits = tl.maximum(columnwise_bits, tl.max(abs_bits(hadamard(blocks)), axis=2))
    if ROWWISE:
        store_partial_amax(partials, bits)
    store_partial_amax(columnwise_partials, columnwise_bits)


# --- codes --------------------------------------------------------------------------------------------------


@triton.jit
def nearest_codes(magnitude):
    """The codes, int32 and without their signs, of fp32 magnitudes, ties to the even code.

    fp32 counts halves below 2^23 and ones above: added to 2^23 - 2, magnitudes up to 4 are rounded as e2m1 rounds. From 4 to 6 that sum
    is even, and half of what is above 4 adds 0 or 1 to it. The bits of the result count the codes.
    """
    above = tl.clamp(magnitude * 0.5 - 2.0, 0.0, 1.0)
    total = (tl.minimum(magnitude, 4.0) + 8388606.0) + above
    return total.to(tl.int32, bitcast=True) - 0x4AFFFFFC  # the bits of 2^23 - 2


@triton.jit
def cast_pairs(low, high):
    """Bytes of the codes of fp32 values, signs included, that of `low` in the low four bits: `nearest_codes` of all but NaN, by one
    instruction (`Target.has_e2m1_casts`). Four bytes fill a register."""
    return tl.inline_asm_elementwise(
        "{ .reg .b8 q0, q1, q2, q3; "
        "cvt.rn.satfinite.e2m1x2.f32 q0, $5, $1; cvt.rn.satfinite.e2m1x2.f32 q1, $6, $2; "
        "cvt.rn.satfinite.e2m1x2.f32 q2, $7, $3; cvt.rn.satfinite.e2m1x2.f32 q3, $8, $4; "
        "mov.b32 $0, {q0, q1, q2, q3}; }",
        "=r,f,f,f,f,f,f,f,f",
        [low, high],
        dtype=tl.uint8,
        is_pure=True,
        pack=4,
    )


@triton.jit
def stochastic_codes(magnitude, bits):
    """The codes, int32 and without their signs, of fp32 magnitudes rounded by nine bits (int32) each.

    Times 2^-14 fp16 has the exponents of e2m1, with nine bits below each code.
    """
    steps = (magnitude * 2.0**-14).to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
    return tl.minimum(steps + bits, 0xFFF) >> 9


@triton.jit
def random_bits(number, first, second):
    """Nine random bits, int32 [R, B, 16], for each element of blocks with numbers [R, B], of the key (first, second): `random_bits`
    of kernels/quantize/nvfp4.py."""
    h = number.to(tl.uint32) * 0x9E3779B1 + first.to(tl.uint32, bitcast=True)
    h = (h ^ (h >> 16)) * 0x7FEB352D
    h = h ^ (h >> 15) ^ second.to(tl.uint32, bitcast=True)
    factor = tl.full((), 0x846CA68B, tl.uint32)
    low, high = h * factor, tl.umulhi(h, factor)
    index = tl.arange(0, 16)[None, None, :]
    pair = rotated(low[:, :, None], _LOW, index % 4) ^ rotated(high[:, :, None], _HIGH, index // 8)
    return (pair >> (index // 4 % 2 * 16)).to(tl.int32) & 0x1FF


@triton.jit
def rotated(word, BYTES: tl.constexpr, index):
    """uint32 words rotated to the left by the byte of that index."""
    by = tl.full((), BYTES, tl.int32) >> (index * 8)
    return (word << (by & 31)) | (word >> (-by & 31))


# --- quantize -----------------------------------------------------------------------------------------------


@triton.jit
def load_scale(partials, amax, PARTIALS: tl.constexpr):
    """(amax, S) of the tensor that `partials` describe; one program also stores the amax."""
    value = load_amax(partials, PARTIALS)
    value = tl.where(value == value, value, float("nan"))  # one NaN of all
    if tl.program_id(0) == 0:
        tl.store(amax, value)
    scale = tl.div_rn(tl.full((), TENSOR_MAX, tl.float32), value)
    scale = tl.where(scale > FLOAT32_MAX, FLOAT32_MAX, scale)
    return value, tl.where((value == 0.0) | (value > FLOAT32_MAX), 1.0, scale)


@triton.jit
def quantize_rows(
    value,
    tensor,
    key,
    place,
    buffers,
    TWO_D: tl.constexpr,
    HADAMARD: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    SWIZZLED: tl.constexpr,
    CASTS: tl.constexpr,
):
    """Codes and scales of the tile `value`, zero outside of its tensor, in blocks along its rows, to buffers: (data, scale_inv).

    tensor: `load_scale`; key: the two words of `random`; place: (row, column) of the tile in [R, C].
    """
    row, column, R, C = place
    data, scale_inv = buffers
    BLOCK_R: tl.constexpr = value.shape[0]
    BLOCK_C: tl.constexpr = value.shape[1]
    B: tl.constexpr = BLOCK_C // 16
    amax, tensor_scale = tensor
    blocks = tl.reshape(value, (BLOCK_R, B, 16))
    if HADAMARD:
        blocks = hadamard(blocks)
    blocks = tl.where(amax == amax, blocks, 0.0)  # a NaN makes all codes 0
    block_amax = tl.max(tl.abs(blocks), axis=2)
    if TWO_D:
        shared = tl.max(tl.reshape(block_amax, (BLOCK_R // 16, 16, B)), axis=1)
        block_amax = tl.reshape(tl.broadcast_to(shared[:, None, :], (BLOCK_R // 16, 16, B)), (BLOCK_R, B))
    one = tl.full((), 1.0, tl.float32)
    scale = (block_amax * (tensor_scale * SIXTH)).to(tl.float8e4nv)  # the conversion saturates
    enc = tl.div_rn(one, scale.to(tl.float32) * tl.div_rn(one, tensor_scale))
    enc = tl.where(enc <= FLOAT32_MAX, enc, FLOAT32_MAX)  # also of NaN: its blocks are zero
    scaled = blocks * enc[:, :, None]
    wide = tl.cdiv(C, 16)  # blocks of a row
    if CASTS and not STOCHASTIC:
        low, high = tl.split(tl.reshape(scaled, (BLOCK_R, BLOCK_C // 2, 2)))
        pairs = cast_pairs(low, high)
    else:
        magnitude = tl.abs(scaled)
        if STOCHASTIC:
            number = (row + tl.arange(0, BLOCK_R))[:, None] * wide + (column // 16 + tl.arange(0, B))[None, :]
            code = stochastic_codes(magnitude, random_bits(number, key[0], key[1]))
        else:
            code = nearest_codes(magnitude)
        code |= (blocks.to(tl.int32, bitcast=True) >> 28) & 8
        even, odd = tl.split(tl.reshape(code, (BLOCK_R, BLOCK_C // 2, 2)))
        pairs = (even | (odd << 4)).to(tl.uint8)
    store_tile(data, pairs, row, column // 2, R, tl.cdiv(C, 32) * 16, BLOCK_R, BLOCK_C // 2)
    tall, padded = (R + 127) // 128 * 128, (wide + 3) // 4 * 4
    scale = tl.where(tile_mask(row, column // 16, R, wide, BLOCK_R, B), scale.to(tl.uint8, bitcast=True), 0)
    if SWIZZLED:
        i, j = row + tl.arange(0, BLOCK_R)[:, None], column // 16 + tl.arange(0, B)[None, :]
        tl.store(scale_inv + scale_offsets(i, j, padded, True), scale, mask=(i < tall) & (j < padded))
    else:
        store_tile(scale_inv, scale, row, column // 16, tall, padded, BLOCK_R, B)


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
    K,
    ROWWISE: tl.constexpr,
    COLUMNWISE: tl.constexpr,
    TWO_D: tl.constexpr,
    HADAMARD: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    SWIZZLED: tl.constexpr,
    CASTS: tl.constexpr,
    PARTIALS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Every tile of x [M, K]: scales and codes by rows, by columns, or both."""
    if ROWWISE:
        by_rows = load_scale(partials, amax, PARTIALS)
    if COLUMNWISE:
        by_columns = load_scale(columnwise_partials, columnwise_amax, PARTIALS)
    first, second = 0, 0
    if STOCHASTIC:
        first, second = tl.load(random), tl.load(random + 1)
    tall, wide = (M + 127) // 128 * 128, (K + 127) // 128 * 128  # whose scales are written
    tiles = tile_total(tall, wide, BLOCK_M, BLOCK_K)
    for index in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=1):
        row, column = tile_from_the_end(index, tiles, wide, BLOCK_M, BLOCK_K)
        value = load_tile(x, row, column, K, M, K, BLOCK_M, BLOCK_K)
        if ROWWISE:
            quantize_rows(
                *(value, by_rows, (first, second), (row, column, M, K), (data, scale_inv)),
                *(TWO_D, False, STOCHASTIC, SWIZZLED, CASTS),
            )
        if COLUMNWISE:
            quantize_rows(
                *(tl.trans(value), by_columns, (second, first), (column, row, K, M)),
                *((columnwise_data, columnwise_scale_inv), TWO_D, HADAMARD, STOCHASTIC, SWIZZLED, CASTS),
            )


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


@updates("c")
@writes("c")
@triton.jit
def nvfp4_epilogue_kernel(
    product,
    a_amax,
    b_amax,
    bias,
    c,
    first_row,
    first_column,
    row_stride,
    M,
    N,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One tile of c = round(product * (amaxA / 2688 * amaxB / 2688) + bias), every step an fp32 operation.

    product [M, N] is a part of the whole, from (first_row, first_column) on; of c, with rows of row_stride, that part is written.
    """
    row, column = tile_origin(tl.program_id(0), N, BLOCK_M, BLOCK_N)
    full = tl.full((), TENSOR_MAX, tl.float32)
    alpha = tl.div_rn(tl.load(a_amax), full) * tl.div_rn(tl.load(b_amax), full)
    value = mul_rn(load_tile(product, row, column, N, M, N, BLOCK_M, BLOCK_N), alpha)
    if HAS_BIAS:
        columns = column + tl.arange(0, BLOCK_N)
        value = value + tl.load(bias + first_column + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    part = c + tl.cast(first_row, tl.int64) * row_stride + first_column
    store_tile(part, value, row, column, M, N, BLOCK_M, BLOCK_N, row_stride)
