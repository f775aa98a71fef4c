"""The kernels of activation.py: x -> f(x), and (dy, x) -> dy f'(x); the amax of the result, the result, and its cast."""

from __future__ import annotations

from te_dynamo.kernels.quantize.current_kernels import stripe
from te_dynamo.kernels.runtime._triton import tl, triton
from te_dynamo.kernels.runtime.writes import updates, writes
from te_dynamo.kernels.tiles.activations import activate, activate_backward
from te_dynamo.kernels.tiles.fp8 import (
    amaxes_of_four,
    larger_or_nan,
    load_tile,
    load_values,
    rounded,
    store_quantized_tile,
    store_rounded_amax,
    store_tile,
    tile_from_the_end,
    tile_origin,
    tile_total,
    widened,
)
from te_dynamo.kernels.tiles.one_pass import (
    begin_pass,
    end_pass,
    guessed,
    mended,
    no_amaxes,
    tiles_to_mend,
    with_amaxes,
)
from te_dynamo.kernels.tiles.row_quarters import load_quarter, quarter_codes, store_codes, store_quarter


@triton.jit
def _result_tile(
    dy,
    x,
    row,
    column,
    M,
    K,
    KIND: tl.constexpr,
    BACKWARD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Tile of the result in fp32; zero outside [M, K]."""
    value = widened(load_values(x, row, column, K, M, K, BLOCK_M, BLOCK_K))
    if BACKWARD:
        grad = widened(load_values(dy, row, column, K, M, K, BLOCK_M, BLOCK_K))
        return activate_backward(grad, value, KIND)
    else:
        return activate(value, KIND)


@writes("partials")
@triton.jit
def activation_amax_kernel(
    dy,
    x,
    partials,
    M,
    K,
    KIND: tl.constexpr,
    BACKWARD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """partials[p] = amax of the result over every PARTIALS-th tile, from tile p on."""
    amaxes = tl.zeros((BLOCK_M, BLOCK_K // 4), tl.float32)
    tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(K, BLOCK_K)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        row, column = tile_origin(tile, K, BLOCK_M, BLOCK_K)
        result = _result_tile(dy, x, row, column, M, K, KIND, BACKWARD, BLOCK_M, BLOCK_K)
        amaxes = larger_or_nan(amaxes, amaxes_of_four(result, BLOCK_M, BLOCK_K))
    store_rounded_amax(partials, amaxes, x.dtype.element_ty)


@writes("partials", "sums")
@triton.jit
def activation_backward_sums_kernel(
    dy,
    x,
    partials,
    sums,
    M,
    K,
    KIND: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """partials[program] = amax of dx over its tiles, sums [PARTS, K] = sums of the rounded dx: of every PARTS-th tile down a
    stripe of columns (`current_kernels.stripe`), with the sums in registers."""
    part, column = stripe(K, BLOCK_K)
    amaxes = tl.zeros((BLOCK_M, BLOCK_K // 4), tl.float32)
    total = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
    for row in range(tl.where(part < PARTS, part * BLOCK_M, M), M, PARTS * BLOCK_M):
        result = _result_tile(dy, x, row, column, M, K, KIND, True, BLOCK_M, BLOCK_K)
        amaxes = larger_or_nan(amaxes, amaxes_of_four(result, BLOCK_M, BLOCK_K))
        total += widened(rounded(result, x.dtype.element_ty))
    store_rounded_amax(partials, amaxes, x.dtype.element_ty)
    store_tile(sums, tl.sum(total, axis=0)[None, :], part, column, PARTS, K, 1, BLOCK_K)


@triton.jit
def _add_parts(sums, dbias, K, PARTS: tl.constexpr, BLOCK_K: tl.constexpr):
    """dbias [K] = the sum of sums [PARTS, K] over its parts: BLOCK_K columns a program, as far as there are any."""
    for column in range(tl.program_id(0) * BLOCK_K, K, tl.num_programs(0) * BLOCK_K):
        total = tl.zeros((32, BLOCK_K), tl.float32)
        for part in range(0, PARTS, 32):
            total += load_tile(sums, tl.cast(part, tl.int32), column, K, PARTS, K, 32, BLOCK_K)
        columns = column + tl.arange(0, BLOCK_K)
        tl.store(dbias + columns, tl.sum(total, axis=0), mask=columns < K)


@triton.jit
def _backward_quarter(
    given,
    scale,
    bits,
    KIND: tl.constexpr,
    KEEP_OUTPUT: tl.constexpr,
    PASS: tl.constexpr,
    DTYPE: tl.constexpr,
    J: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """(codes of quarter J of dx, amaxes of it and of `bits`); writes it in x's dtype if it is kept."""
    dy, x, y, row, column, M, K = given
    value = load_quarter(x, row, column, K, M, K, J, BLOCK_M, BLOCK_K)
    grad = load_quarter(dy, row, column, K, M, K, J, BLOCK_M, BLOCK_K)
    result = rounded(activate_backward(grad, value, KIND), x.dtype.element_ty)
    if KEEP_OUTPUT:
        store_quarter(y, result, row, column, K, M, K, J, BLOCK_M, BLOCK_K)
    return quarter_codes(result, scale, DTYPE), with_amaxes(bits, result, PASS, BLOCK_M // 4, BLOCK_K)


@updates(**mended("data", "transpose"))
@writes(
    **guessed("partials"),
    y="KEEP_OUTPUT",
    dbias="PARTS",
    data="ROWWISE",
    transpose="COLUMNWISE",
    scale_inv=lambda k: (k.ROWWISE or k.COLUMNWISE) and k.PASS != "guess",
)
@triton.jit
def activation_write_kernel(
    dy,
    x,
    partials,
    hint,
    sums,
    y,
    dbias,
    data,
    transpose,
    scale_inv,
    M,
    K,
    KIND: tl.constexpr,
    BACKWARD: tl.constexpr,
    KEEP_OUTPUT: tl.constexpr,
    PASS: tl.constexpr,
    PARTS: tl.constexpr,
    FMAX: tl.constexpr,
    EPS: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    ROWWISE: tl.constexpr,
    COLUMNWISE: tl.constexpr,
    PARTIALS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Every tile of the result to every output that is asked for; dbias from sums [PARTS, K], unless PARTS is 0."""
    if PARTS > 0:
        _add_parts(sums, dbias, K, PARTS, BLOCK_K)
    QUARTERS: tl.constexpr = COLUMNWISE and BACKWARD
    tiles = tile_total(M, K, BLOCK_M, BLOCK_K)
    left = tiles
    if ROWWISE or COLUMNWISE:
        scale = begin_pass(partials, hint, scale_inv, PARTIALS, FMAX, EPS, POWER_OF_TWO, PASS)
        if PASS == "mend":
            left = tiles_to_mend(tiles, hint, scale)
    bits = no_amaxes(BLOCK_M // 4 if QUARTERS else BLOCK_M, BLOCK_K)
    for index in tl.range(tl.program_id(0), left, tl.num_programs(0), num_stages=1):
        row, column = tile_from_the_end(index, tiles, K, BLOCK_M, BLOCK_K)
        if QUARTERS:
            DTYPE: tl.constexpr = transpose.dtype.element_ty
            given = (dy, x, y, row, column, M, K)
            c0, bits = _backward_quarter(given, scale, bits, KIND, KEEP_OUTPUT, PASS, DTYPE, 0, BLOCK_M, BLOCK_K)
            c1, bits = _backward_quarter(given, scale, bits, KIND, KEEP_OUTPUT, PASS, DTYPE, 1, BLOCK_M, BLOCK_K)
            c2, bits = _backward_quarter(given, scale, bits, KIND, KEEP_OUTPUT, PASS, DTYPE, 2, BLOCK_M, BLOCK_K)
            c3, bits = _backward_quarter(given, scale, bits, KIND, KEEP_OUTPUT, PASS, DTYPE, 3, BLOCK_M, BLOCK_K)
            store_codes((c0, c1, c2, c3), (row, column, K, M, K), data, transpose, ROWWISE, BLOCK_M, BLOCK_K)
        else:
            result = _result_tile(dy, x, row, column, M, K, KIND, BACKWARD, BLOCK_M, BLOCK_K)
            result = rounded(result, x.dtype.element_ty)
            bits = with_amaxes(bits, result, PASS, BLOCK_M, BLOCK_K)
            if KEEP_OUTPUT:
                store_tile(y, result, row, column, M, K, BLOCK_M, BLOCK_K)
            if ROWWISE or COLUMNWISE:
                store_quantized_tile(
                    result, scale, row, column, M, K, data, transpose, ROWWISE, COLUMNWISE, BLOCK_M, BLOCK_K
                )
    if ROWWISE or COLUMNWISE:
        end_pass(partials, bits, PARTIALS, PASS)
