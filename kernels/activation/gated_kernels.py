"""The Triton kernels of kernels/activation/gated.py, which says what they compute and launches them."""

from __future__ import annotations

from te_dynamo.kernels.runtime._triton import tl, triton
from te_dynamo.kernels.runtime.dependent_launch import wait_for_predecessor
from te_dynamo.kernels.runtime.writes import updates, writes
from te_dynamo.kernels.tiles.activations import activate, gradients
from te_dynamo.kernels.tiles.fp8 import (
    abs_bits,
    amaxes_of_four,
    larger_or_nan,
    load_tile,
    rounded,
    store_partial_amax,
    store_quantized_tile,
    store_rounded_amax,
    store_tile,
    tile_from_the_end,
    tile_origin,
    tile_total,
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

__all__ = [
    "gated_amax_kernel",
    "gated_backward_amax_kernel",
    "gated_backward_write_kernel",
    "gated_write_kernel",
]


# --- kernels: forward ---------------------------------------------------------------------------------------


@triton.jit
def _forward_tile(
    gate,
    up,
    row,
    column,
    gate_stride,
    up_stride,
    M,
    K,
    KIND: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Tile of gated(gate, up), rounded to gate's dtype; zero outside [M, K]."""
    g = load_tile(gate, row, column, gate_stride, M, K, BLOCK_M, BLOCK_K)
    u = load_tile(up, row, column, up_stride, M, K, BLOCK_M, BLOCK_K)
    return rounded(activate(g, KIND) * u, gate.dtype.element_ty)


@writes("partials")
@triton.jit
def gated_amax_kernel(
    gate,
    up,
    partials,
    gate_stride,
    up_stride,
    M,
    K,
    KIND: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """partials[p] = amax of the result over every PARTIALS-th tile, from tile p on."""
    bits = tl.zeros((BLOCK_M, BLOCK_K), tl.int32)
    tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(K, BLOCK_K)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        row, column = tile_origin(tile, K, BLOCK_M, BLOCK_K)
        result = _forward_tile(gate, up, row, column, gate_stride, up_stride, M, K, KIND, BLOCK_M, BLOCK_K)
        bits = tl.maximum(bits, abs_bits(result))
    store_partial_amax(partials, bits)


def _has_scale(k) -> bool:  # type: ignore[no-untyped-def]
    """Whether a launch knows the scale of what it casts."""
    return (k.ROWWISE or k.COLUMNWISE) and k.PASS != "guess"


@updates(**mended("data", "transpose"))
@writes(**guessed("partials"), y="KEEP_OUTPUT", data="ROWWISE", transpose="COLUMNWISE", scale_inv=_has_scale)
@triton.jit
def gated_write_kernel(
    gate,
    up,
    partials,
    hint,
    y,
    data,
    transpose,
    scale_inv,
    gate_stride,
    up_stride,
    M,
    K,
    KIND: tl.constexpr,
    KEEP_OUTPUT: tl.constexpr,
    PASS: tl.constexpr,
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
    """Every tile of the result to every output that is asked for."""
    wait_for_predecessor(EARLY)
    tiles = tile_total(M, K, BLOCK_M, BLOCK_K)
    left = tiles
    if ROWWISE or COLUMNWISE:
        scale = begin_pass(partials, hint, scale_inv, PARTIALS, FMAX, EPS, POWER_OF_TWO, PASS)
        if PASS == "mend":
            left = tiles_to_mend(tiles, hint, scale)
    bits = no_amaxes(BLOCK_M, BLOCK_K)
    for index in tl.range(tl.program_id(0), left, tl.num_programs(0), num_stages=1):
        row, column = tile_from_the_end(index, tiles, K, BLOCK_M, BLOCK_K)
        result = _forward_tile(gate, up, row, column, gate_stride, up_stride, M, K, KIND, BLOCK_M, BLOCK_K)
        if KEEP_OUTPUT:
            store_tile(y, result, row, column, M, K, BLOCK_M, BLOCK_K)
        if ROWWISE or COLUMNWISE:
            bits = with_amaxes(bits, result, PASS, BLOCK_M, BLOCK_K)
            store_quantized_tile(
                result, scale, row, column, M, K, data, transpose, ROWWISE, COLUMNWISE, BLOCK_M, BLOCK_K
            )
    end_pass(partials, bits, PARTIALS, PASS)


# --- kernels: backward --------------------------------------------------------------------------------------


@triton.jit
def _backward_tiles(
    dy,
    gate,
    up,
    row,
    column,
    gate_stride,
    up_stride,
    M,
    K,
    KIND: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Tiles of (dgate, dup) in fp32; zero outside [M, K]."""
    grad = load_tile(dy, row, column, K, M, K, BLOCK_M, BLOCK_K)
    g = load_tile(gate, row, column, gate_stride, M, K, BLOCK_M, BLOCK_K)
    u = load_tile(up, row, column, up_stride, M, K, BLOCK_M, BLOCK_K)
    return gradients(grad, g, u, KIND)


@triton.jit
def _backward_quarter(
    given,
    gate_bits,
    up_bits,
    KIND: tl.constexpr,
    KEEP_OUTPUT: tl.constexpr,
    PASS: tl.constexpr,
    DTYPE: tl.constexpr,
    J: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Codes of quarter J of (dgate, dup), then their amaxes with those in bits; writes them in gate's dtype if they are kept."""
    dy, gate, up, dgate, dup, gate_scale, up_scale, row, column, gate_stride, up_stride, grad_stride, M, K = given
    grad = load_quarter(dy, row, column, K, M, K, J, BLOCK_M, BLOCK_K)
    g = load_quarter(gate, row, column, gate_stride, M, K, J, BLOCK_M, BLOCK_K)
    u = load_quarter(up, row, column, up_stride, M, K, J, BLOCK_M, BLOCK_K)
    g, u = gradients(grad, g, u, KIND)
    g, u = rounded(g, gate.dtype.element_ty), rounded(u, gate.dtype.element_ty)
    if KEEP_OUTPUT:
        store_quarter(dgate, g, row, column, grad_stride, M, K, J, BLOCK_M, BLOCK_K)
        store_quarter(dup, u, row, column, grad_stride, M, K, J, BLOCK_M, BLOCK_K)
    gate_bits = with_amaxes(gate_bits, g, PASS, BLOCK_M // 4, BLOCK_K)
    up_bits = with_amaxes(up_bits, u, PASS, BLOCK_M // 4, BLOCK_K)
    return quarter_codes(g, gate_scale, DTYPE), quarter_codes(u, up_scale, DTYPE), gate_bits, up_bits


@writes("gate_partials", up_partials=lambda k: not k.ONE_AMAX)
@triton.jit
def gated_backward_amax_kernel(
    dy,
    gate,
    up,
    gate_partials,
    up_partials,
    gate_stride,
    up_stride,
    M,
    K,
    KIND: tl.constexpr,
    ONE_AMAX: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Partial amaxes of dgate and of dup over every PARTIALS-th tile; with ONE_AMAX of both together, in gate_partials."""
    gate_amaxes = tl.zeros((BLOCK_M, BLOCK_K // 4), tl.float32)
    if not ONE_AMAX:
        up_amaxes = tl.zeros((BLOCK_M, BLOCK_K // 4), tl.float32)
    tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(K, BLOCK_K)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        row, column = tile_origin(tile, K, BLOCK_M, BLOCK_K)
        dgate, dup = _backward_tiles(dy, gate, up, row, column, gate_stride, up_stride, M, K, KIND, BLOCK_M, BLOCK_K)
        gate_amaxes = larger_or_nan(gate_amaxes, amaxes_of_four(dgate, BLOCK_M, BLOCK_K))
        if ONE_AMAX:
            gate_amaxes = larger_or_nan(gate_amaxes, amaxes_of_four(dup, BLOCK_M, BLOCK_K))
        else:
            up_amaxes = larger_or_nan(up_amaxes, amaxes_of_four(dup, BLOCK_M, BLOCK_K))
    store_rounded_amax(gate_partials, gate_amaxes, gate.dtype.element_ty)
    if not ONE_AMAX:
        store_rounded_amax(up_partials, up_amaxes, gate.dtype.element_ty)


@updates(**mended("gate_data", "gate_transpose", "up_data", "up_transpose"))
@writes(
    **guessed("gate_partials"),
    up_partials=lambda k: k.PASS == "guess" and k.GATE_HALF == -1,
    dgate="KEEP_OUTPUT",
    dup=lambda k: k.KEEP_OUTPUT and k.GATE_HALF == -1,
    gate_data="ROWWISE",
    gate_transpose="COLUMNWISE",
    gate_scale_inv=_has_scale,
    up_data=lambda k: k.ROWWISE and k.GATE_HALF == -1 and not k.STACKED,
    up_transpose=lambda k: k.COLUMNWISE and k.GATE_HALF == -1 and not k.STACKED,
    up_scale_inv=lambda k: _has_scale(k) and k.GATE_HALF == -1 and not k.STACKED,
)
@triton.jit
def gated_backward_write_kernel(
    dy,
    gate,
    up,
    gate_partials,
    up_partials,
    hint,
    dgate,
    dup,
    gate_data,
    gate_transpose,
    gate_scale_inv,
    up_data,
    up_transpose,
    up_scale_inv,
    gate_stride,
    up_stride,
    M,
    K,
    KIND: tl.constexpr,
    KEEP_OUTPUT: tl.constexpr,
    PASS: tl.constexpr,
    STACKED: tl.constexpr,
    GATE_HALF: tl.constexpr,
    FMAX: tl.constexpr,
    EPS: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    ROWWISE: tl.constexpr,
    COLUMNWISE: tl.constexpr,
    PARTIALS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Every tile of dgate and dup to every output that is asked for; with STACKED the gate's buffers hold both, side by side.

    GATE_HALF: 0 or 1 where both are halves of one tensor, dgate this one: its output is `dgate`, its buffers the gate's, its
    partial amaxes the gate's; -1 elsewhere.
    """
    data_stride = K
    grad_stride = K
    if GATE_HALF != -1:
        data_stride = 2 * K
        grad_stride = 2 * K
        second_transpose = gate_transpose + tl.cast(K, tl.int64) * ((M + 15) // 16 * 16)
        if GATE_HALF == 0:
            dup = dgate + K
            up_data = gate_data + K
            up_transpose = second_transpose
        else:
            dup = dgate
            dgate += K
            up_data = gate_data
            gate_data += K
            up_transpose = gate_transpose
            gate_transpose = second_transpose
    if STACKED:
        data_stride = 2 * K
        up_data = gate_data + K
        up_transpose = gate_transpose + tl.cast(K, tl.int64) * ((M + 15) // 16 * 16)
        up_scale_inv = gate_scale_inv + 1
    tiles = tile_total(M, K, BLOCK_M, BLOCK_K)
    left = tiles
    if ROWWISE or COLUMNWISE:
        g_scale = begin_pass(gate_partials, hint, gate_scale_inv, PARTIALS, FMAX, EPS, POWER_OF_TWO, PASS)
        u_scale = g_scale
        if GATE_HALF == -1:
            u_scale = begin_pass(up_partials, hint + 2, up_scale_inv, PARTIALS, FMAX, EPS, POWER_OF_TWO, PASS)
        if PASS == "mend":
            left = tiles_to_mend(tiles, hint, g_scale)
            if GATE_HALF == -1:
                left = tl.maximum(left, tiles_to_mend(tiles, hint + 2, u_scale))
    ROWS: tl.constexpr = BLOCK_M // 4 if COLUMNWISE else BLOCK_M
    g_bits, u_bits = no_amaxes(ROWS, BLOCK_K), no_amaxes(ROWS, BLOCK_K)
    for index in tl.range(tl.program_id(0), left, tl.num_programs(0), num_stages=1):
        row, column = tile_from_the_end(index, tiles, K, BLOCK_M, BLOCK_K)
        if COLUMNWISE:
            DTYPE: tl.constexpr = gate_transpose.dtype.element_ty
            given = (dy, gate, up, dgate, dup, g_scale, u_scale, row, column, gate_stride, up_stride, grad_stride, M, K)
            g0, u0, g_bits, u_bits = _backward_quarter(
                given, g_bits, u_bits, KIND, KEEP_OUTPUT, PASS, DTYPE, 0, BLOCK_M, BLOCK_K
            )
            g1, u1, g_bits, u_bits = _backward_quarter(
                given, g_bits, u_bits, KIND, KEEP_OUTPUT, PASS, DTYPE, 1, BLOCK_M, BLOCK_K
            )
            g2, u2, g_bits, u_bits = _backward_quarter(
                given, g_bits, u_bits, KIND, KEEP_OUTPUT, PASS, DTYPE, 2, BLOCK_M, BLOCK_K
            )
            g3, u3, g_bits, u_bits = _backward_quarter(
                given, g_bits, u_bits, KIND, KEEP_OUTPUT, PASS, DTYPE, 3, BLOCK_M, BLOCK_K
            )
            place = (row, column, data_stride, M, K)
            store_codes((g0, g1, g2, g3), place, gate_data, gate_transpose, ROWWISE, BLOCK_M, BLOCK_K)
            store_codes((u0, u1, u2, u3), place, up_data, up_transpose, ROWWISE, BLOCK_M, BLOCK_K)
        else:
            g, u = _backward_tiles(dy, gate, up, row, column, gate_stride, up_stride, M, K, KIND, BLOCK_M, BLOCK_K)
            g, u = rounded(g, gate.dtype.element_ty), rounded(u, gate.dtype.element_ty)
            if KEEP_OUTPUT:
                store_tile(dgate, g, row, column, M, K, BLOCK_M, BLOCK_K, grad_stride)
                store_tile(dup, u, row, column, M, K, BLOCK_M, BLOCK_K, grad_stride)
            if ROWWISE:
                g_bits = with_amaxes(g_bits, g, PASS, BLOCK_M, BLOCK_K)
                u_bits = with_amaxes(u_bits, u, PASS, BLOCK_M, BLOCK_K)
                store_quantized_tile(
                    g, g_scale, row, column, M, K, gate_data, gate_data, True, False, BLOCK_M, BLOCK_K, data_stride
                )
                store_quantized_tile(
                    u, u_scale, row, column, M, K, up_data, up_data, True, False, BLOCK_M, BLOCK_K, data_stride
                )
    if GATE_HALF == -1:
        end_pass(gate_partials, g_bits, PARTIALS, PASS)
        end_pass(up_partials, u_bits, PARTIALS, PASS)
    else:
        end_pass(gate_partials, tl.maximum(g_bits, u_bits), PARTIALS, PASS)
