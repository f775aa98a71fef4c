"""The device functions of RMSNorm and LayerNorm that their kernels share, fused and unfused (kernels/norm/norm.py has the formulas).

Statistics are one sum in one order, and everything else is elementwise without a multiply that a compiler could contract
with an addition: what a fused kernel computes has the bits of the unfused one.
"""

from __future__ import annotations

from te_dynamo.kernels.runtime._triton import tl, triton
from te_dynamo.kernels.tiles.blocks import fp32_bits, magnitude
from te_dynamo.kernels.tiles.fp8 import mul_rn, rounded

__all__: list[str] = []


@triton.jit
def load_columns(x, start, K, BLOCK: tl.constexpr):
    """x[start : start + BLOCK] in x's dtype, zero past K."""
    columns = start + tl.arange(0, BLOCK)
    return tl.load(x + columns, mask=columns < K, other=0.0)


@triton.jit
def as_wide(narrow, WIDE: tl.constexpr, start, BLOCK: tl.constexpr):
    """narrow + start + [BLOCK], which a thread has as many neighbours of as of pointers WIDE: one access of more values than one of
    the row's would give the row's sum another layout, and so another order."""
    pointers = narrow + (start + tl.arange(0, BLOCK))
    if narrow.dtype.element_ty.primitive_bitwidth < WIDE.element_ty.primitive_bitwidth:
        pointers = tl.max_contiguous(pointers, 128 // WIDE.element_ty.primitive_bitwidth)
    return pointers


@triton.jit
def load_affine(weight, bias, start, K, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr):
    """(weight, bias)[start : start + BLOCK], zero past K and for what the norm has not."""
    w = load_columns(weight, start, K, BLOCK) if HAS_WEIGHT else 0.0
    b = load_columns(bias, start, K, BLOCK) if HAS_BIAS else 0.0
    return w, b


@triton.jit
def _squares(values, mean, start, K, LAYER: tl.constexpr, BLOCK: tl.constexpr):
    """Sums [BLOCK / 4] of four neighbours' (values - mean)^2, zero past K: one instruction a value."""
    values = values.to(tl.float32)
    if LAYER:
        values = tl.where(start + tl.arange(0, BLOCK) < K, values - mean, 0.0)
    even, odd = tl.split(tl.reshape(values, (BLOCK // 4, 2, 2)))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return tl.fma(d, d, tl.fma(c, c, tl.fma(b, b, mul_rn(a, a))))


@triton.jit
def row_statistics(
    row_start, first, K, EPS_NORM: tl.constexpr, LAYER: tl.constexpr, ONE_BLOCK: tl.constexpr, BLOCK: tl.constexpr
):
    """(mean, rstd) of a row whose first BLOCK values are `first`; mean is 0 unless LAYER."""
    count = K * 1.0
    mean = 0.0
    if LAYER:
        total = first.to(tl.float32)
        if not ONE_BLOCK:
            for start in range(BLOCK, K, BLOCK):
                total += load_columns(row_start, start, K, BLOCK).to(tl.float32)
        mean = tl.div_rn(tl.sum(total, axis=0), count)
    total = _squares(first, mean, 0, K, LAYER, BLOCK)
    if not ONE_BLOCK:
        for start in range(BLOCK, K, BLOCK):
            total += _squares(load_columns(row_start, start, K, BLOCK), mean, start, K, LAYER, BLOCK)
    variance = tl.div_rn(tl.sum(total, axis=0), count)
    return mean, tl.div_rn(tl.full((), 1.0, tl.float32), tl.sqrt_rn(variance + tl.full((), EPS_NORM, tl.float32)))


@triton.jit
def normalize(
    x,
    mean,
    rstd,
    w,  # of x's columns, in any dtype, broadcastable to its shape as all before; b too
    b,
    LAYER: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    CAST_BEFORE_WEIGHT: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    X_DTYPE: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """y of x, rounded to DTYPE. X_DTYPE: x's in memory."""
    x = x.to(tl.float32)
    if LAYER:
        x = x - mean
    if HAS_BIAS:
        b = b.to(tl.float32)
    if HAS_WEIGHT:
        x = x * rstd
        if CAST_BEFORE_WEIGHT:
            x = x.to(X_DTYPE).to(tl.float32)
        scale = w.to(tl.float32)
        if ZERO_CENTERED:
            scale = scale + 1.0
        y = tl.fma(x, scale, b) if HAS_BIAS else x * scale
        if CAST_BEFORE_WEIGHT and w.dtype == DTYPE and not ZERO_CENTERED:
            # A rounded product of 16-bit factors: the compiler makes one instruction of two of them.
            return y.to(DTYPE)
    else:
        y = tl.fma(x, rstd, b) if HAS_BIAS else x * rstd
    return rounded(y, DTYPE)


@triton.jit
def no_magnitudes(BLOCK: tl.constexpr, DTYPE: tl.constexpr):
    """Magnitudes [BLOCK] (`block_tile.magnitude`) of zeros."""
    return tl.zeros((BLOCK,), tl.int16 if DTYPE.primitive_bitwidth == 16 else tl.int32)


@triton.jit
def row_magnitudes(y, columns, K, LAYER: tl.constexpr):
    """Magnitudes of y, of none past K: without a mean y is 0 there by itself, or NaN in a row of NaN."""
    return magnitude(tl.where(columns < K, y, 0.0) if LAYER else y)


@triton.jit
def store_row_amax(partials, magnitudes, PARTIALS: tl.constexpr, DTYPE: tl.constexpr):
    """Writes this program's amax of values in DTYPE, some twice: PARTIALS is the power of two after the number of programs."""
    amax = fp32_bits(tl.max(magnitudes, axis=0), DTYPE).to(tl.float32, bitcast=True)
    tl.store(partials + tl.program_id(0), amax)
    second = tl.program_id(0) + tl.num_programs(0)
    tl.store(partials + second, amax, mask=second < PARTIALS)
