"""Float8 with one scale a tensor: the device functions that all quantizing kernels share, and their host
half.

    amax  = max(max|x|, eps)
    scale = fmax / amax, or 1 where amax is 0, inf or NaN
    q     = cast(clamp(x * scale, -fmax, fmax))

A quantizing launcher makes two launches. The first writes one partial amax a program; every program of the
second reduces all partials by itself, so that there is no atomic, no memset and no third launch. The second
launch is persistent, so that a program does that once for many tiles, and walks the tensor from its end, where
the first one stopped: that part is still in the cache.
"""

from __future__ import annotations

import torch

from te_dynamo.kernels.layouts.sizes import Size
from te_dynamo.kernels.runtime._triton import tl, triton
from te_dynamo.kernels.runtime.launch import multiprocessor_count

FLOAT32_MAX: tl.constexpr = tl.constexpr(3.4028234663852886e38)


# --- device: amax -------------------------------------------------------------------------------------------


@triton.jit
def mul_rn(a, b):
    """a * b in fp32, rounded: unlike `a * b`, no compiler may contract it with a following addition."""
    return tl.inline_asm_elementwise("mul.rn.f32 $0, $1, $2;", "=f,f,f", [a, b], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def rounded(x, DTYPE: tl.constexpr):
    """fp32 x in DTYPE (bf16, fp16 or fp32), to nearest even.

    Two a time: `.to` takes one instruction an element, on the slow unit that exp needs as well.
    """
    if tl.bfloat16 == DTYPE:
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [x], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    elif tl.float16 == DTYPE:
        return tl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [x], dtype=tl.float16, is_pure=True, pack=2
        )
    else:
        return x


@triton.jit
def widened(x):
    """x in fp32, one instruction an element: for bf16 `.to` takes two where halves of a register must be told apart."""
    if x.dtype == tl.bfloat16:
        asm: tl.constexpr = "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xFFFF0000;"
        result = tl.inline_asm_elementwise(asm, "=&f,=f,r", [x], dtype=tl.float32, is_pure=True, pack=2)
    else:
        result = x.to(tl.float32)
    return result


@triton.jit
def abs_bits(x):
    """Bit pattern of |x| in fp32: as integers they order as the values do, NaN above inf above the finite."""
    return x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def store_partial_amax(partials, bits):
    """Writes this program's amax, the maximum of `bits`, to partials[program]."""
    tl.store(partials + tl.program_id(0), tl.max(bits, axis=None).to(tl.float32, bitcast=True))


@triton.jit
def store_amax(partials, bits, PARTIALS: tl.constexpr):
    """This program's amax, the maximum of `bits`, in its place and in those that no program has: PARTIALS or fewer run."""
    amax = tl.max(bits, axis=None).to(tl.float32, bitcast=True)
    places = tl.arange(0, PARTIALS)
    tl.store(partials + places, amax, mask=places % tl.num_programs(0) == tl.program_id(0))


@triton.jit
def larger_or_nan(a, b):
    """The larger one, or NaN if either is that."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def amaxes_of_four(x, R: tl.constexpr, C: tl.constexpr):
    """Amaxes [R, C / 4] of every four neighbours in rows of fp32 x [R, C], NaN above inf: they lie in one thread, which
    carries a quarter of the registers from tile to tile and has room for another program beside it."""
    return tl.reduce(tl.reshape(tl.abs(x), (R, C // 4, 4)), 2, larger_or_nan)


@triton.jit
def store_rounded_amax(partials, amaxes, DTYPE: tl.constexpr):
    """Writes this program's amax of values rounded to DTYPE from amaxes of the values themselves: rounding keeps order."""
    amax = tl.max(abs_bits(amaxes), axis=None).to(tl.float32, bitcast=True)
    tl.store(partials + tl.program_id(0), amax.to(DTYPE).to(tl.float32))


@triton.jit
def load_amax(partials, PARTIALS: tl.constexpr, count=None):
    """The tensor's amax from its fp32 [PARTIALS] partial ones, or from `count` of them."""
    places = tl.arange(0, PARTIALS)
    mask = None if count is None else places < count
    bits = abs_bits(tl.load(partials + places, mask=mask, other=None if count is None else 0.0))
    return tl.max(bits, axis=0).to(tl.float32, bitcast=True)


# --- device: scale and cast ---------------------------------------------------------------------------------


@triton.jit
def scale_from_amax(
    amax,
    FMAX: tl.constexpr,
    EPS: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    LARGEST: tl.constexpr,
):
    """The module's scale rule, fp32, every operation correctly rounded; an infinite quotient is LARGEST."""
    eps = tl.full((), EPS, tl.float32)
    amax = tl.where(amax < eps, eps, amax)
    scale = tl.div_rn(tl.full((), FMAX, tl.float32), amax)
    scale = tl.where(scale > FLOAT32_MAX, LARGEST, scale)
    scale = tl.where((amax > 0.0) & (amax <= FLOAT32_MAX), scale, 1.0)
    if POWER_OF_TWO:
        scale = (scale.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    return scale


@triton.jit
def load_scale(
    partials,
    scale_inv,
    PARTIALS: tl.constexpr,
    FMAX: tl.constexpr,
    EPS: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    count=None,
):
    """The scale of the tensor that `partials` describe; one program also stores its inverse."""
    scale = scale_from_amax(load_amax(partials, PARTIALS, count), FMAX, EPS, POWER_OF_TWO, FLOAT32_MAX)
    if tl.program_id(0) == 0:
        tl.store(scale_inv, tl.div_rn(tl.full((), 1.0, tl.float32), scale))
    return scale


@triton.jit
def saturating_cast(x, scale, DTYPE: tl.constexpr):
    """x * scale in DTYPE: the hardware's cast (cvt.rn.satfinite) makes the largest value of what exceeds it, NaN of NaN."""
    return (x.to(tl.float32) * scale).to(DTYPE)


# --- device: tiles ------------------------------------------------------------------------------------------


@triton.jit
def tile_origin(tile, K, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):
    """(first row, first column) of the tile of that number, row of tiles by row of tiles."""
    tiles_k = tl.cdiv(K, BLOCK_K)
    return (tile // tiles_k) * BLOCK_M, (tile % tiles_k) * BLOCK_K


@triton.jit
def tile_total(M, K, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):
    """Tiles of an [M, K] tensor."""
    return tl.cdiv(M, BLOCK_M) * tl.cdiv(K, BLOCK_K)


@triton.jit
def tile_from_the_end(index, tiles, K, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):
    """(first row, first column) of the tile with that number counted from the last one."""
    return tile_origin(tiles - 1 - index, K, BLOCK_M, BLOCK_K)


@triton.jit
def tile_offsets(row, column, row_stride, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):
    """Element offsets [BLOCK_M, BLOCK_K]: 64 bits for the tile's corner only, 32 inside."""
    corner = row.to(tl.int64) * row_stride + column
    return corner + (tl.arange(0, BLOCK_M)[:, None] * row_stride + tl.arange(0, BLOCK_K)[None, :])


@triton.jit
def tile_mask(row, column, M, K, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):
    """Which elements of the tile lie inside [M, K]."""
    return (row + tl.arange(0, BLOCK_M) < M)[:, None] & (column + tl.arange(0, BLOCK_K) < K)[None, :]


@triton.jit
def load_values(x, row, column, row_stride, M, K, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):
    """Tile of x [M, K], zero outside."""
    offsets = tile_offsets(row, column, row_stride, BLOCK_M, BLOCK_K)
    return tl.load(x + offsets, mask=tile_mask(row, column, M, K, BLOCK_M, BLOCK_K), other=0.0)


@triton.jit
def load_tile(x, row, column, row_stride, M, K, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):
    """Tile of x [M, K] in fp32, zero outside."""
    return load_values(x, row, column, row_stride, M, K, BLOCK_M, BLOCK_K).to(tl.float32)


@triton.jit
def store_tile(y, value, row, column, M, K, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, row_stride=None):
    """Writes a tile of y [M, K], contiguous unless a row stride is given."""
    stride = K if row_stride is None else row_stride
    mask = tile_mask(row, column, M, K, BLOCK_M, BLOCK_K)
    tl.store(y + tile_offsets(row, column, stride, BLOCK_M, BLOCK_K), value, mask=mask)


@triton.jit
def store_quantized_tile(
    value,  # zero outside [M, K]: the transpose's padding is stored from there
    scale,
    row,
    column,
    M,
    K,
    data,
    transpose,
    ROWWISE: tl.constexpr,
    COLUMNWISE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    data_stride=None,  # elements from row to row, where data and transpose are part of a wider stack
    transpose_stride=None,
):
    """Casts a tile and writes it to data [M, K], to transpose [K, M rounded up to 16], or to both."""
    DTYPE: tl.constexpr = data.dtype.element_ty if ROWWISE else transpose.dtype.element_ty
    quantized = saturating_cast(value, scale, DTYPE)
    if ROWWISE:
        stride = K if data_stride is None else data_stride
        mask = tile_mask(row, column, M, K, BLOCK_M, BLOCK_K)
        tl.store(data + tile_offsets(row, column, stride, BLOCK_M, BLOCK_K), quantized, mask=mask)
    if COLUMNWISE:
        # Computed here, not passed: the compiler then sees a multiple of 16 and stores whole vectors.
        padded = (M + 15) // 16 * 16
        stride = padded if transpose_stride is None else transpose_stride
        mask = tile_mask(column, row, K, padded, BLOCK_K, BLOCK_M)
        tl.store(transpose + tile_offsets(column, row, stride, BLOCK_K, BLOCK_M), tl.trans(quantized), mask=mask)


# --- host ---------------------------------------------------------------------------------------------------


def zero_padded(x: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """x at the upper left of zero bytes [rows, columns]; contiguous. float8 travels as integers: torch fills no float8."""
    integers = x.view(torch.uint8) if x.element_size() == 1 else x
    zeros = integers.new_zeros(
        rows, columns
    )  # written by no assignment and F.pad: te_dynamo.export takes neither with symbolic sizes
    upper = zeros[: x.shape[0]].slice_scatter(integers, 1, 0, x.shape[1])
    return zeros.slice_scatter(upper, 0, 0, x.shape[0]).view(x.dtype)


PROGRAMS_PER_MULTIPROCESSOR = 8
"""Programs of a persistent launch for each multiprocessor. So many are resident at once with the tiles in use, and loads hide behind stores."""


def program_count(rows: Size, columns: Size, block_m: int, block_k: int, device: torch.device) -> int:
    """Programs of a persistent launch: no more than tiles, but one at least, which writes an empty tensor's scale.

    A symbolic `rows` takes as many as the device runs; those without a tile do nothing.
    """
    most = PROGRAMS_PER_MULTIPROCESSOR * multiprocessor_count(device)
    if not (isinstance(rows, int) and isinstance(columns, int)):
        return most
    return min(max(triton.cdiv(rows, block_m) * triton.cdiv(columns, block_k), 1), most)
