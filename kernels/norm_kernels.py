"""The Triton kernels of kernels/norm.py, which says what they compute and launches them."""

from __future__ import annotations

from te_dynamo.kernels._triton import tl, triton
from te_dynamo.kernels.block_tile import fp32_bits, larger, magnitude
from te_dynamo.kernels.fp8 import (
    load_scale,
    load_tile,
    mul_rn,
    store_quantized_tile,
    store_tile,
    tile_from_the_end,
    tile_total,
)

__all__ = ["norm_cast_kernel", "norm_rows_kernel"]


# --- device -------------------------------------------------------------------------------------------------


@triton.jit
def _load_columns(x, start, K, BLOCK: tl.constexpr):
    """x[start : start + BLOCK], zero past K."""
    columns = start + tl.arange(0, BLOCK)
    return tl.load(x + columns, mask=columns < K, other=0.0)


@triton.jit
def _squares(values, mean, start, K, LAYER: tl.constexpr, BLOCK: tl.constexpr):
    """(values - mean)^2, zero past K."""
    if LAYER:
        values = tl.where(start + tl.arange(0, BLOCK) < K, values - mean, 0.0)
    return mul_rn(values, values)


@triton.jit
def _row_statistics(
    row_start, first, K, EPS_NORM: tl.constexpr, LAYER: tl.constexpr, ONE_BLOCK: tl.constexpr, BLOCK: tl.constexpr
):
    """(mean, rstd) of a row whose first BLOCK values are `first` (fp32); mean is 0 unless LAYER."""
    count = K * 1.0
    mean = 0.0
    if LAYER:
        total = first
        if not ONE_BLOCK:
            for start in range(BLOCK, K, BLOCK):
                total += _load_columns(row_start, start, K, BLOCK).to(tl.float32)
        mean = tl.div_rn(tl.sum(total, axis=0), count)
    total = _squares(first, mean, 0, K, LAYER, BLOCK)
    if not ONE_BLOCK:
        for start in range(BLOCK, K, BLOCK):
            values = _load_columns(row_start, start, K, BLOCK).to(tl.float32)
            total += _squares(values, mean, start, K, LAYER, BLOCK)
    variance = tl.div_rn(tl.sum(total, axis=0), count)
    return mean, tl.div_rn(tl.full((), 1.0, tl.float32), tl.sqrt_rn(variance + tl.full((), EPS_NORM, tl.float32)))


@triton.jit
def _normalize(
    x,
    mean,
    rstd,
    weight,
    bias,
    columns,  # broadcastable to x's shape, as mean and rstd
    K,
    LAYER: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    CAST_BEFORE_WEIGHT: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """y of fp32 x, rounded to DTYPE."""
    if LAYER:
        x = x - mean
    if HAS_BIAS:
        b = tl.load(bias + columns, mask=columns < K, other=0.0).to(tl.float32)
    if HAS_WEIGHT:
        w = tl.load(weight + columns, mask=columns < K, other=0.0).to(tl.float32)
        if ZERO_CENTERED:
            w = w + 1.0
        x = x * rstd
        if CAST_BEFORE_WEIGHT:
            x = x.to(DTYPE).to(tl.float32)
        y = tl.fma(x, w, b) if HAS_BIAS else x * w
    else:
        y = tl.fma(x, rstd, b) if HAS_BIAS else x * rstd
    return y.to(DTYPE)


# --- kernels ------------------------------------------------------------------------------------------------


@triton.jit
def norm_rows_kernel(
    x,
    weight,
    bias,
    y,
    mean,
    rstd,
    partials,
    M,
    K,
    EPS_NORM: tl.constexpr,  # not a float argument: Inductor would pass it as fp64
    LAYER: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    CAST_BEFORE_WEIGHT: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    QUANTIZE: tl.constexpr,
    ONE_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Statistics of every ROW_PROGRAMS-th row, then y (unfused) or the partial amax of y (QUANTIZE)."""
    programs = tl.num_programs(0)
    DTYPE: tl.constexpr = x.dtype.element_ty
    bits = tl.zeros((BLOCK,), tl.int16 if DTYPE.primitive_bitwidth == 16 else tl.int32)
    row_start = x + tl.program_id(0).to(tl.int64) * K
    # The next row is on its way while this one is summed.
    following = _load_columns(row_start, 0, tl.where(tl.program_id(0) < M, K, 0), BLOCK)
    for row in range(tl.program_id(0), M, programs):
        first = following.to(tl.float32)
        row_start = x + tl.cast(row, tl.int64) * K
        following = _load_columns(
            row_start + tl.cast(programs, tl.int64) * K, 0, tl.where(row + programs < M, K, 0), BLOCK
        )
        row_mean, row_rstd = _row_statistics(row_start, first, K, EPS_NORM, LAYER, ONE_BLOCK, BLOCK)
        tl.store(rstd + row, row_rstd)
        if LAYER:
            tl.store(mean + row, row_mean)
        for block in range(1 if ONE_BLOCK else tl.cdiv(K, BLOCK)):
            start = block * BLOCK
            columns = start + tl.arange(0, BLOCK)
            values = first if ONE_BLOCK else _load_columns(row_start, start, K, BLOCK).to(tl.float32)
            result = _normalize(
                values,
                row_mean,
                row_rstd,
                weight,
                bias,
                columns,
                K,
                LAYER,
                HAS_WEIGHT,
                HAS_BIAS,
                CAST_BEFORE_WEIGHT,
                ZERO_CENTERED,
                DTYPE,
            )
            if QUANTIZE:
                if LAYER:  # otherwise y past K is 0, or NaN in a row of NaN
                    result = tl.where(columns < K, result, 0.0)
                bits = larger(bits, magnitude(result))
            else:
                tl.store(y + tl.cast(row, tl.int64) * K + columns, result, mask=columns < K)
    if QUANTIZE:
        amax = fp32_bits(tl.max(bits, axis=0), DTYPE).to(tl.float32, bitcast=True)
        tl.store(partials + tl.program_id(0), amax)


@triton.jit
def norm_cast_kernel(
    x,
    weight,
    bias,
    mean,
    rstd,
    partials,
    y,
    data,
    transpose,
    scale_inv,
    M,
    K,
    LAYER: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    CAST_BEFORE_WEIGHT: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    KEEP_OUTPUT: tl.constexpr,
    FMAX: tl.constexpr,
    EPS: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    ROWWISE: tl.constexpr,
    COLUMNWISE: tl.constexpr,
    PARTIALS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Every tile of y, made again from the rows' statistics, to every output that is asked for."""
    scale = load_scale(partials, scale_inv, PARTIALS, FMAX, EPS, POWER_OF_TWO)
    tiles = tile_total(M, K, BLOCK_M, BLOCK_K)
    for index in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=1):
        row, column = tile_from_the_end(index, tiles, K, BLOCK_M, BLOCK_K)
        values = load_tile(x, row, column, K, M, K, BLOCK_M, BLOCK_K)
        # Loaded flat: as a column, every thread would load its row's statistics once for each of its elements.
        rows = row + tl.arange(0, BLOCK_M)
        row_mean = tl.load(mean + rows, mask=rows < M, other=0.0)[:, None] if LAYER else 0.0
        result = _normalize(
            values,
            row_mean,
            tl.load(rstd + rows, mask=rows < M, other=0.0)[:, None],
            weight,
            bias,
            column + tl.arange(0, BLOCK_K)[None, :],
            K,
            LAYER,
            HAS_WEIGHT,
            HAS_BIAS,
            CAST_BEFORE_WEIGHT,
            ZERO_CENTERED,
            x.dtype.element_ty,
        )
        if KEEP_OUTPUT:
            store_tile(y, result, row, column, M, K, BLOCK_M, BLOCK_K)
        # Past the last row y is bias, but the transpose's padding is zero.
        result = tl.where((rows < M)[:, None], result, 0.0)
        store_quantized_tile(result, scale, row, column, M, K, data, transpose, ROWWISE, COLUMNWISE, BLOCK_M, BLOCK_K)
