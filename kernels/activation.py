"""Activations, their backward, and both fused with quantization.

    gelu       x * Phi(x)                    gelu_tanh  x * sigmoid(2 * sqrt(2/pi) * (x + 0.044715 x^3))
    silu       x * sigmoid(x)                relu       max(x, 0)

All arithmetic is fp32 with one rounding, to the input's dtype, at the end. A fused function is two
launches: the amax of the rounded result, then the result again, cast (kernels/fp8.py); the cheap function
is computed twice and its result never read back. The same device functions serve fused and unfused kernels,
and no multiply in them can be contracted with an addition that the source does not write as `tl.fma`: fused
equals unfused plus `quantize`, bit for bit.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from te_dynamo.kernels._triton import tl, triton
from te_dynamo.kernels.fp8 import (
    Fp8Buffers,
    amaxes_of_four,
    larger_or_nan,
    load_scale,
    load_tile,
    mul_rn,
    program_count,
    rounded,
    rows_and_columns,
    store_quantized_tile,
    store_rounded_amax,
    store_tile,
    tile_from_the_end,
    tile_origin,
    tile_total,
)
from te_dynamo.kernels.launch import launch
from te_dynamo.kernels.quantize import PARTIALS, Tile, amax_tile, cast_tile, quantize_reference
from te_dynamo.kernels.quarters import load_quarter, quarter_codes, store_codes, store_quarter

__all__ = [
    "KINDS",
    "activate",
    "activate_backward",
    "activation",
    "activation_backward",
    "activation_backward_quantize",
    "activation_backward_quantize_reference",
    "activation_backward_reference",
    "activation_quantize",
    "activation_quantize_reference",
    "activation_reference",
    "check_kind",
    "sigmoid",
]

KINDS = ("gelu", "gelu_tanh", "silu", "relu")


FORWARD_TILE: Tile = (128, 64, 4)
BACKWARD_TILE: Tile = (128, 64, 8)
BIAS_GRAD_TILE: Tile = (128, 64, 8)
"""Of the cast launches on an H200 for GELU; the last, of a backward that sums columns too."""


# --- reference ----------------------------------------------------------------------------------------------


def check_kind(kind: str) -> None:
    """Raises ValueError for an activation that does not exist."""
    if kind not in KINDS:
        raise ValueError(f"activation: expected one of {', '.join(KINDS)}, got {kind!r}")


def activation_reference(x: torch.Tensor, kind: str) -> torch.Tensor:
    """`activation` in plain PyTorch."""
    check_kind(kind)
    value = x.to(torch.float32)
    if kind == "relu":
        value = F.relu(value)
    elif kind == "silu":
        value = F.silu(value)
    else:
        value = F.gelu(value, approximate="tanh" if kind == "gelu_tanh" else "none")
    return value.to(x.dtype)


def activation_backward_reference(dy: torch.Tensor, x: torch.Tensor, kind: str) -> torch.Tensor:
    """`activation_backward` in plain PyTorch."""
    check_kind(kind)
    grad, value = dy.to(torch.float32), x.to(torch.float32)
    if kind == "relu":
        dx = torch.ops.aten.threshold_backward(grad, value, 0)
    elif kind == "silu":
        dx = torch.ops.aten.silu_backward(grad, value)
    else:
        dx = torch.ops.aten.gelu_backward(grad, value, approximate="tanh" if kind == "gelu_tanh" else "none")
    return dx.to(x.dtype)


def activation_quantize_reference(
    x: torch.Tensor,
    kind: str,
    fp8_dtype: torch.dtype,
    rowwise: bool,
    columnwise: bool,
    power_of_two: bool,
    eps: float,
    keep_output: bool,
) -> list[torch.Tensor]:
    """`activation_quantize` in plain PyTorch."""
    y = activation_reference(x, kind)
    return [
        *([y] if keep_output else []),
        *quantize_reference(y, fp8_dtype, rowwise, columnwise, power_of_two, eps),
    ]


def activation_backward_quantize_reference(
    dy: torch.Tensor,
    x: torch.Tensor,
    kind: str,
    fp8_dtype: torch.dtype,
    rowwise: bool,
    columnwise: bool,
    power_of_two: bool,
    eps: float,
    keep_output: bool,
    bias_grad: bool,
) -> list[torch.Tensor]:
    """`activation_backward_quantize` in plain PyTorch."""
    dx = activation_backward_reference(dy, x, kind)
    result = [dx] if keep_output else []
    if bias_grad:
        result.append(dx.reshape(-1, dx.shape[-1]).sum(0, dtype=torch.float32))
    return [*result, *quantize_reference(dx, fp8_dtype, rowwise, columnwise, power_of_two, eps)]


# --- device: the functions, fp32 to fp32 --------------------------------------------------------------------


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)), 0 and 1 where exp overflows and vanishes; relative error 1e-6, no denormals.

    Four instructions: `tl.exp2` and `/` take five more to treat denormals, which no rounding to 16 bits shows.
    """
    denominator = 1.0 + _approximate("ex2", x * -1.4426950408889634)
    return _approximate("rcp", denominator)


@triton.jit
def _approximate(FUNCTION: tl.constexpr, x):
    """2^x ("ex2") or 1 / x ("rcp") by the hardware's own function, denormals flushed to zero."""
    INSTRUCTION: tl.constexpr = FUNCTION + ".approx.ftz.f32 $0, $1;"
    return tl.inline_asm_elementwise(INSTRUCTION, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _normal_tail(t):
    """(R, G) with Phi(-t) = R * G and G = exp(-t^2/2), t >= 0, relative error 1e-6 for R.

    R = Phi(-t) exp(t^2/2) is smooth: a polynomial in s = 1 / (1 + 0.36 t), fitted (minimax, relative) on t
    <= 13.2, beyond which fp32 underflows. Unlike 1 + erf, nothing cancels in the tail, and backward needs
    the same G.
    """
    s = _approximate("rcp", tl.fma(t, 0.36, 1.0))
    r = tl.fma(s, 0.0475255511701107, -0.1813708394765854)
    r = tl.fma(r, s, 0.18314078450202942)
    r = tl.fma(r, s, 0.02504204958677292)
    r = tl.fma(r, s, 0.14027069509029388)
    r = tl.fma(r, s, 0.14167150855064392)
    r = tl.fma(r, s, 0.14372023940086365)
    return r * s, _approximate("ex2", t * t * -0.7213475204444817)


@triton.jit
def _normal_cdf(x, tail, gauss):
    """Phi(x) from `_normal_tail(|x|)`."""
    return tl.where(x < 0.0, tail * gauss, tl.fma(-tail, gauss, 1.0))


@triton.jit
def activate(x, KIND: tl.constexpr):
    """f(x) of that kind, fp32. NaN gives NaN."""
    if KIND == "relu":
        return tl.where(x <= 0.0, 0.0, x)
    elif KIND == "silu":
        return x * sigmoid(x)
    elif KIND == "gelu_tanh":
        return x * sigmoid(x * tl.fma(x * x, 0.07135481282636416, 1.5957691216057308))
    else:
        tail, gauss = _normal_tail(tl.abs(x))
        return x * _normal_cdf(x, tail, gauss)


@triton.jit
def activate_backward(dy, x, KIND: tl.constexpr):
    """dy * f'(x) of that kind, fp32."""
    if KIND == "relu":
        return tl.where(x <= 0.0, 0.0, dy)
    elif KIND == "silu":
        s = sigmoid(x)
        return mul_rn(dy, s * tl.fma(x, 1.0 - s, 1.0))
    elif KIND == "gelu_tanh":
        # f' is 0 or 1 far before 30; without the clamp, x^2 overflows there and meets a zero.
        x = tl.where(x > 30.0, 30.0, tl.where(x < -30.0, -30.0, x))
        square = x * x
        s = sigmoid(x * tl.fma(square, 0.07135481282636416, 1.5957691216057308))
        slope = x * tl.fma(square, 0.21406443847909248, 1.5957691216057308)
        return mul_rn(dy, s * tl.fma(slope, 1.0 - s, 1.0))
    else:
        tail, gauss = _normal_tail(tl.abs(x))
        return mul_rn(dy, tl.fma(x * 0.3989422804014327, gauss, _normal_cdf(x, tail, gauss)))


# --- kernels: x -> f(x), and (dy, x) -> dy f'(x) ------------------------------------------------------------


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
    value = load_tile(x, row, column, K, M, K, BLOCK_M, BLOCK_K)
    if BACKWARD:
        grad = load_tile(dy, row, column, K, M, K, BLOCK_M, BLOCK_K)
        return activate_backward(grad, value, KIND)
    else:
        return activate(value, KIND)


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


@triton.jit
def _backward_quarter(
    dy,
    x,
    y,
    scale,
    row,
    column,
    M,
    K,
    KIND: tl.constexpr,
    KEEP_OUTPUT: tl.constexpr,
    DTYPE: tl.constexpr,
    J: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """(codes, values in fp32) of quarter J of dx; writes it in x's dtype if it is kept."""
    value = load_quarter(x, row, column, K, M, K, J, BLOCK_M, BLOCK_K)
    grad = load_quarter(dy, row, column, K, M, K, J, BLOCK_M, BLOCK_K)
    result = rounded(activate_backward(grad, value, KIND), x.dtype.element_ty)
    if KEEP_OUTPUT:
        store_quarter(y, result, row, column, K, M, K, J, BLOCK_M, BLOCK_K)
    return quarter_codes(result, scale, DTYPE), result.to(tl.float32)


@triton.jit
def activation_write_kernel(
    dy,
    x,
    partials,
    y,
    bias_partials,
    data,
    transpose,
    scale_inv,
    M,
    K,
    KIND: tl.constexpr,
    BACKWARD: tl.constexpr,
    KEEP_OUTPUT: tl.constexpr,
    BIAS_GRAD: tl.constexpr,
    FMAX: tl.constexpr,
    EPS: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    ROWWISE: tl.constexpr,
    COLUMNWISE: tl.constexpr,
    PARTIALS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Every tile of the result to every output that is asked for."""
    if ROWWISE or COLUMNWISE:
        scale = load_scale(partials, scale_inv, PARTIALS, FMAX, EPS, POWER_OF_TWO)
    tiles = tile_total(M, K, BLOCK_M, BLOCK_K)
    for index in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=1):
        row, column = tile_from_the_end(index, tiles, K, BLOCK_M, BLOCK_K)
        if COLUMNWISE and BACKWARD:
            DTYPE: tl.constexpr = transpose.dtype.element_ty
            c0, r0 = _backward_quarter(
                dy, x, y, scale, row, column, M, K, KIND, KEEP_OUTPUT, DTYPE, 0, BLOCK_M, BLOCK_K
            )
            c1, r1 = _backward_quarter(
                dy, x, y, scale, row, column, M, K, KIND, KEEP_OUTPUT, DTYPE, 1, BLOCK_M, BLOCK_K
            )
            c2, r2 = _backward_quarter(
                dy, x, y, scale, row, column, M, K, KIND, KEEP_OUTPUT, DTYPE, 2, BLOCK_M, BLOCK_K
            )
            c3, r3 = _backward_quarter(
                dy, x, y, scale, row, column, M, K, KIND, KEEP_OUTPUT, DTYPE, 3, BLOCK_M, BLOCK_K
            )
            if BIAS_GRAD:
                partial_row = row // BLOCK_M * 2
                # Rows of a thread first.
                sums = tl.reshape((r0 + r1) + (r2 + r3), (2, BLOCK_M // 8, BLOCK_K))
                store_tile(bias_partials, tl.sum(sums, axis=1), partial_row, column, partial_row + 2, K, 2, BLOCK_K)
            store_codes((c0, c1, c2, c3), (row, column, K, M, K), data, transpose, ROWWISE, BLOCK_M, BLOCK_K)
        else:
            result = _result_tile(dy, x, row, column, M, K, KIND, BACKWARD, BLOCK_M, BLOCK_K)
            result = rounded(result, x.dtype.element_ty)
            if KEEP_OUTPUT:
                store_tile(y, result, row, column, M, K, BLOCK_M, BLOCK_K)
            if BIAS_GRAD:
                halves = tl.reshape(result.to(tl.float32), (2, BLOCK_M // 2, BLOCK_K))
                partial_row = row // BLOCK_M * 2
                store_tile(bias_partials, tl.sum(halves, axis=1), partial_row, column, partial_row + 2, K, 2, BLOCK_K)
            if ROWWISE or COLUMNWISE:
                store_quantized_tile(
                    result, scale, row, column, M, K, data, transpose, ROWWISE, COLUMNWISE, BLOCK_M, BLOCK_K
                )


# --- launchers ----------------------------------------------------------------------------------------------


def activation(x: torch.Tensor, kind: str) -> torch.Tensor:
    """f(x) in x's shape and dtype (bf16, fp16 or fp32). Raises ValueError for an unknown kind."""
    return _write(x, x, kind, backward=False)


def activation_backward(dy: torch.Tensor, x: torch.Tensor, kind: str) -> torch.Tensor:
    """dx = dy * f'(x) in x's shape and dtype."""
    return _write(dy, x, kind, backward=True)


def activation_quantize(
    x: torch.Tensor,
    kind: str,
    fp8_dtype: torch.dtype,
    rowwise: bool,
    columnwise: bool,
    power_of_two: bool,
    eps: float,
    keep_output: bool,
    tile: Tile | None = None,
) -> list[torch.Tensor]:
    """[f(x)?, data?, transpose?, scale_inv], equal to `activation` then `quantize`."""
    quantization = (fp8_dtype, rowwise, columnwise, power_of_two, eps)
    return _quantize(x, x, kind, False, *quantization, keep_output, False, tile)


def activation_backward_quantize(
    dy: torch.Tensor,
    x: torch.Tensor,
    kind: str,
    fp8_dtype: torch.dtype,
    rowwise: bool,
    columnwise: bool,
    power_of_two: bool,
    eps: float,
    keep_output: bool,
    bias_grad: bool,
    tile: Tile | None = None,
) -> list[torch.Tensor]:
    """[dx?, dbias?, data?, transpose?, scale_inv], equal to `activation_backward` then `quantize`.

    dbias (fp32 [K]) is the sum of the rounded dx over its rows.
    """
    quantization = (fp8_dtype, rowwise, columnwise, power_of_two, eps)
    return _quantize(dy, x, kind, True, *quantization, keep_output, bias_grad, tile)


def _write(dy: torch.Tensor, x: torch.Tensor, kind: str, backward: bool) -> torch.Tensor:
    check_kind(kind)
    dy, x = dy.contiguous(), x.contiguous()
    rows, columns = rows_and_columns(x)
    y = torch.empty_like(x)
    block_m, block_k, warps = amax_tile(columns)
    launch(
        activation_write_kernel,
        (program_count(rows, columns, block_m, block_k, x.device),),
        dy=dy,
        x=x,
        partials=x,
        y=y,
        bias_partials=x,
        data=x,
        transpose=x,
        scale_inv=x,
        M=rows,
        K=columns,
        KIND=kind,
        BACKWARD=backward,
        KEEP_OUTPUT=True,
        BIAS_GRAD=False,
        FMAX=1.0,
        EPS=0.0,
        POWER_OF_TWO=False,
        ROWWISE=False,
        COLUMNWISE=False,
        PARTIALS=1,
        BLOCK_M=block_m,
        BLOCK_K=block_k,
        num_warps=warps,
    )
    return y


def _quantize(
    dy: torch.Tensor,
    x: torch.Tensor,
    kind: str,
    backward: bool,
    fp8_dtype: torch.dtype,
    rowwise: bool,
    columnwise: bool,
    power_of_two: bool,
    eps: float,
    keep_output: bool,
    bias_grad: bool,
    tile: Tile | None,
) -> list[torch.Tensor]:
    check_kind(kind)
    dy, x = dy.contiguous(), x.contiguous()
    rows, columns = rows_and_columns(x)
    partials = torch.empty(PARTIALS, dtype=torch.float32, device=x.device)
    block_m, block_k, warps = amax_tile(columns)
    function = {"dy": dy, "x": x, "KIND": kind, "BACKWARD": backward}
    launch(
        activation_amax_kernel,
        (PARTIALS,),
        **function,
        partials=partials,
        M=rows,
        K=columns,
        BLOCK_M=block_m,
        BLOCK_K=block_k,
        num_warps=warps,
    )
    large = BIAS_GRAD_TILE if bias_grad else BACKWARD_TILE if backward else FORWARD_TILE
    block_m, block_k, warps = tile or cast_tile(rows, columns, columnwise, large)
    y = torch.empty_like(x) if keep_output else x
    bias_partials = x
    if bias_grad:
        # Two rows a row of tiles: with one, tracing would guard on whether the tensor has a single one.
        partial_rows = 2 * triton.cdiv(rows, block_m)
        bias_partials = torch.empty((partial_rows, columns), dtype=torch.float32, device=x.device)
    buffers = Fp8Buffers(rows, columns, x.device, fp8_dtype, rowwise, columnwise)
    for number, usage in enumerate(buffers.launches(x.element_size())):
        launch(
            activation_write_kernel,
            (program_count(rows, columns, block_m, block_k, x.device),),
            **function,
            partials=partials,
            y=y,
            bias_partials=bias_partials,
            M=rows,
            K=columns,
            KEEP_OUTPUT=keep_output and number == 0,
            BIAS_GRAD=bias_grad and number == 0,
            **buffers.pointers(unused=x),
            **buffers.constants(power_of_two, eps),
            **usage,
            PARTIALS=PARTIALS,
            BLOCK_M=block_m,
            BLOCK_K=block_k,
            num_warps=warps,
        )
    dbias = [bias_partials.sum(0)] if bias_grad else []
    return [*([y] if keep_output else []), *dbias, *buffers.as_list()]
