"""The kernels of tensor.py: the amax of what sources.py makes, and what is written of it with one scale a tensor, or unquantized."""

from __future__ import annotations

from te_dynamo.kernels.produce.sources import computed, has_second
from te_dynamo.kernels.quantize.current_kernels import stripe
from te_dynamo.kernels.runtime._triton import tl, triton
from te_dynamo.kernels.runtime.dependent_launch import wait_for_predecessor
from te_dynamo.kernels.runtime.writes import updates, writes
from te_dynamo.kernels.tiles.fp8 import (
    abs_bits,
    amaxes_of_four,
    larger_or_nan,
    load_tile,
    load_values,
    rounded,
    store_partial_amax,
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

# --- amaxes ---------------------------------------------------------------------------------------------------


@triton.jit
def load_part(x, stride, place, HOW: tl.constexpr, J: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):
    """The tile of x at place (row, column, M, K) in fp32, zero outside; of J that is not -1 this quarter of it (row_quarters.py)."""
    row, column, M, K = place
    if stride is None:
        stride = K
    if J != -1:
        part = load_quarter(x, row, column, stride, M, K, J, BLOCK_M, BLOCK_K)
    elif HOW[0] == "gated" or HOW[0] == "gated_backward":
        part = load_tile(x, row, column, stride, M, K, BLOCK_M, BLOCK_K)
    else:
        part = widened(load_values(x, row, column, stride, M, K, BLOCK_M, BLOCK_K))
    return part


@triton.jit
def made_tile(inputs, strides, place, HOW: tl.constexpr, J: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):
    """(that part of the result in fp32, of the second gradient), zero outside. Where a stride is None, the offsets are those of the result."""
    a, b, c = inputs
    a_stride, b_stride, c_stride = strides
    SOURCE: tl.constexpr = HOW[0]
    if SOURCE == "activation_backward":  # in the order in which they are loaded
        y = load_part(b, b_stride, place, HOW, J, BLOCK_M, BLOCK_K)
        x = load_part(a, a_stride, place, HOW, J, BLOCK_M, BLOCK_K)
    else:
        x = load_part(a, a_stride, place, HOW, J, BLOCK_M, BLOCK_K)
        y = load_part(b, b_stride, place, HOW, J, BLOCK_M, BLOCK_K) if b is not None else x
    z = load_part(c, c_stride, place, HOW, J, BLOCK_M, BLOCK_K) if c is not None else y
    return computed(x, y, z, 0.0, 0.0, HOW, a.dtype.element_ty)


@triton.jit
def larger_amaxes(amaxes, values, DTYPE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):
    """amaxes with the magnitudes of a tile: as bits of rounded values where they are integers, else of every four neighbours."""
    if amaxes.dtype == tl.int32:
        larger = tl.maximum(amaxes, abs_bits(rounded(values, DTYPE)))
    else:
        larger = larger_or_nan(amaxes, amaxes_of_four(values, BLOCK_M, BLOCK_K))
    return larger


@writes("partials", second_partials=lambda k: k.SOURCE == "gated_backward" and not k.TOGETHER, sums="PARTS")
@triton.jit
def produce_amax_kernel(
    a,
    b,
    c,
    partials,
    second_partials,
    sums,
    M,
    K,
    a_stride,
    b_stride,
    c_stride,
    SOURCE: tl.constexpr,
    KIND: tl.constexpr,
    ROUNDED_TO: tl.constexpr,
    TOGETHER: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """partials[p] = amax of every tile of the result that is as many behind tile p as there are programs; of both gradients of a gated unit
    with TOGETHER in partials, else of the second in second_partials.

    PARTS: programs of a stripe of columns (`current_kernels.stripe`), which also write sums [PARTS, K], those of the rounded result in every
    PARTS-th row of tiles; 0 where no sums are asked for.
    """
    DTYPE: tl.constexpr = tl.bfloat16 if ROUNDED_TO == "bf16" else tl.float16 if ROUNDED_TO == "fp16" else tl.float32
    HOW: tl.constexpr = (SOURCE, KIND)
    TWO: tl.constexpr = SOURCE == "gated_backward" and not TOGETHER
    inputs, strides = (a, b, c), (a_stride, b_stride, c_stride)
    if SOURCE == "gated":
        amaxes = tl.zeros((BLOCK_M, BLOCK_K), tl.int32)
    else:
        amaxes = tl.zeros((BLOCK_M, BLOCK_K // 4), tl.float32)
    if TWO:
        second_amaxes = tl.zeros((BLOCK_M, BLOCK_K // 4), tl.float32)
    if PARTS > 0:
        part, column = stripe(K, BLOCK_K)
        total = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
        begin, end, step = tl.where(part < PARTS, part * BLOCK_M, M), M, PARTS * BLOCK_M
    else:
        begin, end, step = tl.program_id(0), tl.cdiv(M, BLOCK_M) * tl.cdiv(K, BLOCK_K), tl.num_programs(0)
    for index in range(begin, end, step):
        if PARTS > 0:
            row = index
        else:
            row, column = tile_origin(index, K, BLOCK_M, BLOCK_K)
        first, second = made_tile(inputs, strides, (row, column, M, K), HOW, -1, BLOCK_M, BLOCK_K)
        amaxes = larger_amaxes(amaxes, first, DTYPE, BLOCK_M, BLOCK_K)
        if TWO:
            second_amaxes = larger_amaxes(second_amaxes, second, DTYPE, BLOCK_M, BLOCK_K)
        elif SOURCE == "gated_backward":
            amaxes = larger_amaxes(amaxes, second, DTYPE, BLOCK_M, BLOCK_K)
        if PARTS > 0:
            total += widened(rounded(first, DTYPE))
    if SOURCE == "gated":
        store_partial_amax(partials, amaxes)
    else:
        store_rounded_amax(partials, amaxes, DTYPE)
    if TWO:
        store_rounded_amax(second_partials, second_amaxes, DTYPE)
    if PARTS > 0:
        store_tile(sums, tl.sum(total, axis=0)[None, :], part, column, PARTS, K, 1, BLOCK_K)


# --- everything else ------------------------------------------------------------------------------------------


@triton.jit
def add_parts(sums, dbias, K, PARTS: tl.constexpr, BLOCK_K: tl.constexpr):
    """dbias [K] = the sum of sums [PARTS, K] over its parts: BLOCK_K columns a program, as far as there are any."""
    for column in range(tl.program_id(0) * BLOCK_K, K, tl.num_programs(0) * BLOCK_K):
        total = tl.zeros((32, BLOCK_K), tl.float32)
        for part in range(0, PARTS, 32):
            total += load_tile(sums, tl.cast(part, tl.int32), column, K, PARTS, K, 32, BLOCK_K)
        columns = column + tl.arange(0, BLOCK_K)
        tl.store(dbias + columns, tl.sum(total, axis=0), mask=columns < K)


@triton.jit
def made_quarter(given, amaxes, MADE: tl.constexpr, CODE: tl.constexpr, J: tl.constexpr):
    """(codes of quarter J of the result, of the second gradient, amaxes of both with those that are given); written if it is kept."""
    inputs, strides, place, outputs, scales = given
    HOW: tl.constexpr = MADE[0]
    DTYPE: tl.constexpr = MADE[1]
    KEEP_OUTPUT: tl.constexpr = MADE[2]
    PASS: tl.constexpr = MADE[3]
    BLOCK_M: tl.constexpr = MADE[4]
    BLOCK_K: tl.constexpr = MADE[5]
    row, column, M, K = place
    y, second_y, width = outputs
    first, second = made_tile(inputs, strides, place, HOW, J, BLOCK_M, BLOCK_K)
    first, second = rounded(first, DTYPE), rounded(second, DTYPE)
    if KEEP_OUTPUT:
        store_quarter(y, first, row, column, width, M, K, J, BLOCK_M, BLOCK_K)
        if HOW[0] == "gated_backward":
            store_quarter(second_y, second, row, column, width, M, K, J, BLOCK_M, BLOCK_K)
    first_amaxes = with_amaxes(amaxes[0], first, PASS, BLOCK_M // 4, BLOCK_K)
    second_amaxes = with_amaxes(amaxes[1], second, PASS, BLOCK_M // 4, BLOCK_K)
    codes = quarter_codes(first, scales[0], CODE), quarter_codes(second, scales[1], CODE)
    return codes[0], codes[1], (first_amaxes, second_amaxes)


@triton.jit
def halves_of(both, size, HALF: tl.constexpr):
    """Where the first gradient begins, and the second, in what holds both: the first is this HALF, or the one in front."""
    behind = both + size
    if HALF == 1:
        first, second = behind, both
    else:
        first, second = both, behind
    return first, second


def _has_scale(k) -> bool:  # type: ignore[no-untyped-def]
    """Whether a launch knows the scale of what it casts."""
    return (k.ROWWISE or k.COLUMNWISE) and k.PASS != "guess"


@updates(**mended("data", "transpose", "second_data", "second_transpose"))
@writes(
    **guessed("partials"),
    second_partials=lambda k: k.PASS == "guess" and has_second(k),
    y="KEEP_OUTPUT",
    second_y=lambda k: k.KEEP_OUTPUT and has_second(k),
    dbias="PARTS",
    data="ROWWISE",
    transpose="COLUMNWISE",
    scale_inv=_has_scale,
    second_data=lambda k: k.ROWWISE and has_second(k) and not k.STACKED,
    second_transpose=lambda k: k.COLUMNWISE and has_second(k) and not k.STACKED,
    second_scale_inv=lambda k: _has_scale(k) and has_second(k) and not k.STACKED,
)
@triton.jit
def produce_write_kernel(
    a,
    b,
    c,
    partials,
    second_partials,
    hint,
    sums,
    y,
    second_y,
    dbias,
    data,
    transpose,
    scale_inv,
    second_data,
    second_transpose,
    second_scale_inv,
    M,
    K,
    a_stride,
    b_stride,
    c_stride,
    SOURCE: tl.constexpr,
    KIND: tl.constexpr,
    ROUNDED_TO: tl.constexpr,
    KEEP_OUTPUT: tl.constexpr,
    PASS: tl.constexpr,
    PARTS: tl.constexpr,
    STACKED: tl.constexpr,
    HALF: tl.constexpr,
    FMAX: tl.constexpr,
    EPS: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    ROWWISE: tl.constexpr,
    COLUMNWISE: tl.constexpr,
    PARTIALS: tl.constexpr,
    EARLY: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Every tile of the result to every output that is asked for; dbias from sums [PARTS, K], unless PARTS is 0.

    Of two gradients: with STACKED data and transpose hold both, side by side, and scale_inv both scales. HALF: 0 or 1 where they are halves
    of one tensor, the first this one: y, data, transpose, scale_inv and partials are that tensor's; -1 elsewhere.
    """
    wait_for_predecessor(EARLY)
    if PARTS > 0:
        add_parts(sums, dbias, K, PARTS, BLOCK_K)
    PAIR: tl.constexpr = SOURCE == "gated_backward"
    QUARTERS: tl.constexpr = COLUMNWISE and (PAIR or SOURCE == "activation_backward")
    DTYPE: tl.constexpr = tl.bfloat16 if ROUNDED_TO == "bf16" else tl.float16 if ROUNDED_TO == "fp16" else tl.float32
    HOW: tl.constexpr = (SOURCE, KIND)
    MADE: tl.constexpr = (HOW, DTYPE, KEEP_OUTPUT, PASS, BLOCK_M, BLOCK_K)
    kept_width = K if HALF == -1 else 2 * K
    width = 2 * K if STACKED else kept_width
    behind = tl.cast(K, tl.int64) * ((M + 15) // 16 * 16)  # where the second half of a transpose begins
    if COLUMNWISE and HALF != -1:  # in the order of the code that was measured
        transpose, second_transpose = halves_of(transpose, behind, HALF)
    if KEEP_OUTPUT and HALF != -1:
        y, second_y = halves_of(y, K, HALF)
    if ROWWISE and (STACKED or HALF != -1):
        data, second_data = halves_of(data, K, HALF)
    if STACKED:
        second_scale_inv = scale_inv + 1
        if COLUMNWISE:
            transpose, second_transpose = halves_of(transpose, behind, HALF)
    tiles = tile_total(M, K, BLOCK_M, BLOCK_K)
    left, scale, second_scale = tiles, 1.0, 1.0
    if ROWWISE or COLUMNWISE:
        scale = begin_pass(partials, hint, scale_inv, PARTIALS, FMAX, EPS, POWER_OF_TWO, PASS)
        second_scale = scale
        if PAIR and HALF == -1:
            second_hint = hint if PASS == "known" else hint + 2
            second_scale = begin_pass(
                second_partials, second_hint, second_scale_inv, PARTIALS, FMAX, EPS, POWER_OF_TWO, PASS
            )
        if PASS == "mend":
            left = tiles_to_mend(tiles, hint, scale)
            if PAIR and HALF == -1:
                left = tl.maximum(left, tiles_to_mend(tiles, second_hint, second_scale))
    ROWS: tl.constexpr = BLOCK_M // 4 if QUARTERS else BLOCK_M
    amaxes = no_amaxes(ROWS, BLOCK_K), no_amaxes(ROWS, BLOCK_K)
    inputs, strides = (a, b, c), (a_stride, b_stride, c_stride)
    for index in tl.range(tl.program_id(0), left, tl.num_programs(0), num_stages=1):
        row, column = tile_from_the_end(index, tiles, K, BLOCK_M, BLOCK_K)
        place = row, column, M, K
        if QUARTERS:
            CODE: tl.constexpr = transpose.dtype.element_ty
            given = inputs, strides, place, (y, second_y, kept_width), (scale, second_scale)
            c0, d0, amaxes = made_quarter(given, amaxes, MADE, CODE, 0)
            c1, d1, amaxes = made_quarter(given, amaxes, MADE, CODE, 1)
            c2, d2, amaxes = made_quarter(given, amaxes, MADE, CODE, 2)
            c3, d3, amaxes = made_quarter(given, amaxes, MADE, CODE, 3)
            wide_place = row, column, width, M, K
            store_codes((c0, c1, c2, c3), wide_place, data, transpose, ROWWISE, BLOCK_M, BLOCK_K)
            if PAIR:
                store_codes((d0, d1, d2, d3), wide_place, second_data, second_transpose, ROWWISE, BLOCK_M, BLOCK_K)
        else:
            first, second = made_tile(inputs, strides, place, HOW, -1, BLOCK_M, BLOCK_K)
            first, second = rounded(first, DTYPE), rounded(second, DTYPE)
            if KEEP_OUTPUT:
                store_tile(y, first, row, column, M, K, BLOCK_M, BLOCK_K, kept_width)
                if PAIR:
                    store_tile(second_y, second, row, column, M, K, BLOCK_M, BLOCK_K, kept_width)
            if ROWWISE or COLUMNWISE:
                first_amaxes = with_amaxes(amaxes[0], first, PASS, BLOCK_M, BLOCK_K)
                amaxes = first_amaxes, with_amaxes(amaxes[1], second, PASS, BLOCK_M, BLOCK_K)
                store_quantized_tile(
                    *(first, scale, row, column, M, K, data, transpose),
                    *(ROWWISE, COLUMNWISE, BLOCK_M, BLOCK_K, width),
                )
                if PAIR:
                    store_quantized_tile(
                        *(second, second_scale, row, column, M, K, second_data, second_transpose),
                        *(ROWWISE, COLUMNWISE, BLOCK_M, BLOCK_K, width),
                    )
    if PAIR and HALF == -1:
        end_pass(partials, amaxes[0], PARTIALS, PASS)
        end_pass(second_partials, amaxes[1], PARTIALS, PASS)
    elif PAIR:
        end_pass(partials, tl.maximum(amaxes[0], amaxes[1]), PARTIALS, PASS)
    else:
        end_pass(partials, amaxes[0], PARTIALS, PASS)
