"""swiglu(gate, up) = silu(gate) * up, its backward, and both fused with quantization (as
kernels/activation.py).

    dgate = dy * up * s * (1 + gate * (1 - s))        dup = dy * gate * s        s = sigmoid(gate)

gate and up may be halves of one wider tensor: each has a row stride of its own. Backward quantizes dgate
and dup, each with its own scale, in one pair of launches, so that dy, gate and up are read twice and not
four times.
"""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F

from te_dynamo.kernels._triton import tl, triton
from te_dynamo.kernels.activation import activate, activate_backward
from te_dynamo.kernels.fp8 import (
    Fp8Buffers,
    Size,
    amaxes_of_four,
    larger_or_nan,
    load_scale,
    load_tile,
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
    "swiglu",
    "swiglu_backward",
    "swiglu_backward_quantize",
    "swiglu_backward_quantize_reference",
    "swiglu_backward_reference",
    "swiglu_quantize",
    "swiglu_quantize_reference",
    "swiglu_reference",
]


FORWARD_TILE: Tile = (128, 64, 4)
BACKWARD_TILE: Tile = (128, 64, 8)
"""Of the cast launches, the fastest on an H200 at 8192x14336 (benchmarks/quantize.py --sweep)."""


# --- reference ----------------------------------------------------------------------------------------------


def swiglu_reference(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """`swiglu` in plain PyTorch."""
    return (F.silu(gate.to(torch.float32)) * up.to(torch.float32)).to(gate.dtype)


def swiglu_backward_reference(
    dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`swiglu_backward` in plain PyTorch."""
    grad, gate32 = dy.to(torch.float32), gate.to(torch.float32)
    dgate = torch.ops.aten.silu_backward(grad * up.to(torch.float32), gate32)
    return dgate.to(gate.dtype), (grad * F.silu(gate32)).to(gate.dtype)


def swiglu_quantize_reference(
    gate: torch.Tensor,
    up: torch.Tensor,
    fp8_dtype: torch.dtype,
    rowwise: bool,
    columnwise: bool,
    power_of_two: bool,
    eps: float,
    keep_output: bool,
) -> list[torch.Tensor]:
    """`swiglu_quantize` in plain PyTorch."""
    y = swiglu_reference(gate, up)
    return [
        *([y] if keep_output else []),
        *quantize_reference(y, fp8_dtype, rowwise, columnwise, power_of_two, eps),
    ]


def swiglu_backward_quantize_reference(
    dy: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    fp8_dtype: torch.dtype,
    rowwise: bool,
    columnwise: bool,
    power_of_two: bool,
    eps: float,
    keep_output: bool,
) -> list[torch.Tensor]:
    """`swiglu_backward_quantize` in plain PyTorch."""
    grads = swiglu_backward_reference(dy, gate, up)
    result = list(grads) if keep_output else []
    for grad in grads:
        result += quantize_reference(grad, fp8_dtype, rowwise, columnwise, power_of_two, eps)
    return result


# --- kernels: forward ---------------------------------------------------------------------------------------


@triton.jit
def _forward_tile(gate, up, row, column, gate_stride, up_stride, M, K, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):
    """Tile of swiglu(gate, up) in fp32; zero outside [M, K]."""
    g = load_tile(gate, row, column, gate_stride, M, K, BLOCK_M, BLOCK_K)
    u = load_tile(up, row, column, up_stride, M, K, BLOCK_M, BLOCK_K)
    return activate(g, "silu") * u


@triton.jit
def swiglu_amax_kernel(gate, up, partials, gate_stride, up_stride, M, K, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):
    """partials[p] = amax of the result over every PARTIALS-th tile, from tile p on."""
    amaxes = tl.zeros((BLOCK_M, BLOCK_K // 4), tl.float32)
    tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(K, BLOCK_K)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        row, column = tile_origin(tile, K, BLOCK_M, BLOCK_K)
        result = _forward_tile(gate, up, row, column, gate_stride, up_stride, M, K, BLOCK_M, BLOCK_K)
        amaxes = larger_or_nan(amaxes, amaxes_of_four(result, BLOCK_M, BLOCK_K))
    store_rounded_amax(partials, amaxes, gate.dtype.element_ty)


@triton.jit
def _forward_quarter(
    gate,
    up,
    y,
    scale,
    row,
    column,
    gate_stride,
    up_stride,
    M,
    K,
    KEEP_OUTPUT: tl.constexpr,
    DTYPE: tl.constexpr,
    J: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Codes of quarter J of the result; writes it in gate's dtype if it is kept."""
    g = load_quarter(gate, row, column, gate_stride, M, K, J, BLOCK_M, BLOCK_K)
    u = load_quarter(up, row, column, up_stride, M, K, J, BLOCK_M, BLOCK_K)
    result = rounded(activate(g, "silu") * u, gate.dtype.element_ty)
    if KEEP_OUTPUT:
        store_quarter(y, result, row, column, M, K, J, BLOCK_M, BLOCK_K)
    return quarter_codes(result, scale, DTYPE)


@triton.jit
def swiglu_write_kernel(
    gate,
    up,
    partials,
    y,
    data,
    transpose,
    scale_inv,
    gate_stride,
    up_stride,
    M,
    K,
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
    """Every tile of the result to every output that is asked for."""
    if ROWWISE or COLUMNWISE:
        scale = load_scale(partials, scale_inv, PARTIALS, FMAX, EPS, POWER_OF_TWO)
    tiles = tile_total(M, K, BLOCK_M, BLOCK_K)
    for index in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=1):
        row, column = tile_from_the_end(index, tiles, K, BLOCK_M, BLOCK_K)
        if COLUMNWISE:
            DTYPE: tl.constexpr = transpose.dtype.element_ty
            c0 = _forward_quarter(
                gate, up, y, scale, row, column, gate_stride, up_stride, M, K, KEEP_OUTPUT, DTYPE, 0, BLOCK_M, BLOCK_K
            )
            c1 = _forward_quarter(
                gate, up, y, scale, row, column, gate_stride, up_stride, M, K, KEEP_OUTPUT, DTYPE, 1, BLOCK_M, BLOCK_K
            )
            c2 = _forward_quarter(
                gate, up, y, scale, row, column, gate_stride, up_stride, M, K, KEEP_OUTPUT, DTYPE, 2, BLOCK_M, BLOCK_K
            )
            c3 = _forward_quarter(
                gate, up, y, scale, row, column, gate_stride, up_stride, M, K, KEEP_OUTPUT, DTYPE, 3, BLOCK_M, BLOCK_K
            )
            store_codes(c0, c1, c2, c3, row, column, M, K, data, transpose, ROWWISE, COLUMNWISE, BLOCK_M, BLOCK_K)
        else:
            result = _forward_tile(gate, up, row, column, gate_stride, up_stride, M, K, BLOCK_M, BLOCK_K)
            result = rounded(result, gate.dtype.element_ty)
            if KEEP_OUTPUT:
                store_tile(y, result, row, column, M, K, BLOCK_M, BLOCK_K)
            if ROWWISE or COLUMNWISE:
                store_quantized_tile(
                    result, scale, row, column, M, K, data, transpose, ROWWISE, COLUMNWISE, BLOCK_M, BLOCK_K
                )


# --- kernels: backward --------------------------------------------------------------------------------------


@triton.jit
def _backward_tiles(
    dy, gate, up, row, column, gate_stride, up_stride, M, K, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr
):
    """Tiles of (dgate, dup) in fp32; zero outside [M, K]."""
    grad = load_tile(dy, row, column, K, M, K, BLOCK_M, BLOCK_K)
    g = load_tile(gate, row, column, gate_stride, M, K, BLOCK_M, BLOCK_K)
    u = load_tile(up, row, column, up_stride, M, K, BLOCK_M, BLOCK_K)
    return _backward(grad, g, u)


@triton.jit
def _backward(dy, gate, up):
    """(dgate, dup) in fp32."""
    return activate_backward(dy * up, gate, "silu"), dy * activate(gate, "silu")


@triton.jit
def _backward_quarter(
    dy,
    gate,
    up,
    dgate,
    dup,
    gate_scale,
    up_scale,
    row,
    column,
    gate_stride,
    up_stride,
    M,
    K,
    KEEP_OUTPUT: tl.constexpr,
    DTYPE: tl.constexpr,
    J: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Codes of quarter J of (dgate, dup); writes them in gate's dtype if they are kept."""
    grad = load_quarter(dy, row, column, K, M, K, J, BLOCK_M, BLOCK_K)
    g = load_quarter(gate, row, column, gate_stride, M, K, J, BLOCK_M, BLOCK_K)
    u = load_quarter(up, row, column, up_stride, M, K, J, BLOCK_M, BLOCK_K)
    g, u = _backward(grad, g, u)
    g, u = rounded(g, gate.dtype.element_ty), rounded(u, gate.dtype.element_ty)
    if KEEP_OUTPUT:
        store_quarter(dgate, g, row, column, M, K, J, BLOCK_M, BLOCK_K)
        store_quarter(dup, u, row, column, M, K, J, BLOCK_M, BLOCK_K)
    return quarter_codes(g, gate_scale, DTYPE), quarter_codes(u, up_scale, DTYPE)


@triton.jit
def swiglu_backward_amax_kernel(
    dy,
    gate,
    up,
    gate_partials,
    up_partials,
    gate_stride,
    up_stride,
    M,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Partial amaxes of dgate and of dup over every PARTIALS-th tile."""
    gate_amaxes = tl.zeros((BLOCK_M, BLOCK_K // 4), tl.float32)
    up_amaxes = tl.zeros((BLOCK_M, BLOCK_K // 4), tl.float32)
    tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(K, BLOCK_K)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        row, column = tile_origin(tile, K, BLOCK_M, BLOCK_K)
        dgate, dup = _backward_tiles(dy, gate, up, row, column, gate_stride, up_stride, M, K, BLOCK_M, BLOCK_K)
        gate_amaxes = larger_or_nan(gate_amaxes, amaxes_of_four(dgate, BLOCK_M, BLOCK_K))
        up_amaxes = larger_or_nan(up_amaxes, amaxes_of_four(dup, BLOCK_M, BLOCK_K))
    store_rounded_amax(gate_partials, gate_amaxes, gate.dtype.element_ty)
    store_rounded_amax(up_partials, up_amaxes, gate.dtype.element_ty)


@triton.jit
def swiglu_backward_write_kernel(
    dy,
    gate,
    up,
    gate_partials,
    up_partials,
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
    """Every tile of dgate and dup to every output that is asked for."""
    if ROWWISE or COLUMNWISE:
        g_scale = load_scale(gate_partials, gate_scale_inv, PARTIALS, FMAX, EPS, POWER_OF_TWO)
        u_scale = load_scale(up_partials, up_scale_inv, PARTIALS, FMAX, EPS, POWER_OF_TWO)
    tiles = tile_total(M, K, BLOCK_M, BLOCK_K)
    for index in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=1):
        row, column = tile_from_the_end(index, tiles, K, BLOCK_M, BLOCK_K)
        if COLUMNWISE:
            DTYPE: tl.constexpr = gate_transpose.dtype.element_ty
            g0, u0 = _backward_quarter(
                dy,
                gate,
                up,
                dgate,
                dup,
                g_scale,
                u_scale,
                row,
                column,
                gate_stride,
                up_stride,
                M,
                K,
                KEEP_OUTPUT,
                DTYPE,
                0,
                BLOCK_M,
                BLOCK_K,
            )
            g1, u1 = _backward_quarter(
                dy,
                gate,
                up,
                dgate,
                dup,
                g_scale,
                u_scale,
                row,
                column,
                gate_stride,
                up_stride,
                M,
                K,
                KEEP_OUTPUT,
                DTYPE,
                1,
                BLOCK_M,
                BLOCK_K,
            )
            g2, u2 = _backward_quarter(
                dy,
                gate,
                up,
                dgate,
                dup,
                g_scale,
                u_scale,
                row,
                column,
                gate_stride,
                up_stride,
                M,
                K,
                KEEP_OUTPUT,
                DTYPE,
                2,
                BLOCK_M,
                BLOCK_K,
            )
            g3, u3 = _backward_quarter(
                dy,
                gate,
                up,
                dgate,
                dup,
                g_scale,
                u_scale,
                row,
                column,
                gate_stride,
                up_stride,
                M,
                K,
                KEEP_OUTPUT,
                DTYPE,
                3,
                BLOCK_M,
                BLOCK_K,
            )
            store_codes(
                g0, g1, g2, g3, row, column, M, K, gate_data, gate_transpose, ROWWISE, COLUMNWISE, BLOCK_M, BLOCK_K
            )
            store_codes(u0, u1, u2, u3, row, column, M, K, up_data, up_transpose, ROWWISE, COLUMNWISE, BLOCK_M, BLOCK_K)
        else:
            g, u = _backward_tiles(dy, gate, up, row, column, gate_stride, up_stride, M, K, BLOCK_M, BLOCK_K)
            g, u = rounded(g, gate.dtype.element_ty), rounded(u, gate.dtype.element_ty)
            if KEEP_OUTPUT:
                store_tile(dgate, g, row, column, M, K, BLOCK_M, BLOCK_K)
                store_tile(dup, u, row, column, M, K, BLOCK_M, BLOCK_K)
            if ROWWISE or COLUMNWISE:
                store_quantized_tile(
                    g, g_scale, row, column, M, K, gate_data, gate_transpose, ROWWISE, COLUMNWISE, BLOCK_M, BLOCK_K
                )
                store_quantized_tile(
                    u, u_scale, row, column, M, K, up_data, up_transpose, ROWWISE, COLUMNWISE, BLOCK_M, BLOCK_K
                )


# --- launchers ----------------------------------------------------------------------------------------------

_NO_QUANTIZATION = {
    "FMAX": 1.0,
    "EPS": 0.0,
    "POWER_OF_TWO": False,
    "ROWWISE": False,
    "COLUMNWISE": False,
    "PARTIALS": 1,
}


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, contiguous, in gate's shape and dtype.

    gate and up have rank >= 2 and a contiguous last dimension; their other dimensions must collapse to one
    row stride (ValueError otherwise).
    """
    sizes = _sizes(gate, up)
    y = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    block_m, block_k, warps = amax_tile(sizes["K"])
    launch(
        swiglu_write_kernel,
        (program_count(sizes["M"], sizes["K"], block_m, block_k, gate.device),),
        gate=gate,
        up=up,
        partials=gate,
        y=y,
        data=gate,
        transpose=gate,
        scale_inv=gate,
        **sizes,
        KEEP_OUTPUT=True,
        **_NO_QUANTIZATION,
        BLOCK_M=block_m,
        BLOCK_K=block_k,
        num_warps=warps,
    )
    return y


def swiglu_quantize(
    gate: torch.Tensor,
    up: torch.Tensor,
    fp8_dtype: torch.dtype,
    rowwise: bool,
    columnwise: bool,
    power_of_two: bool,
    eps: float,
    keep_output: bool,
    tile: Tile | None = None,
) -> list[torch.Tensor]:
    """[swiglu(gate, up)?, data?, transpose?, scale_inv], equal to `swiglu` then `quantize`."""
    sizes = _sizes(gate, up)
    rows, columns = sizes["M"], sizes["K"]
    partials = torch.empty(PARTIALS, dtype=torch.float32, device=gate.device)
    block_m, block_k, warps = amax_tile(columns)
    launch(
        swiglu_amax_kernel,
        (PARTIALS,),
        gate=gate,
        up=up,
        partials=partials,
        **sizes,
        BLOCK_M=block_m,
        BLOCK_K=block_k,
        num_warps=warps,
    )
    y = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device) if keep_output else gate
    buffers = Fp8Buffers(rows, columns, gate.device, fp8_dtype, rowwise, columnwise)
    block_m, block_k, warps = tile or cast_tile(rows, columns, columnwise, FORWARD_TILE)
    for number, usage in enumerate(buffers.launches(gate.element_size())):
        launch(
            swiglu_write_kernel,
            (program_count(rows, columns, block_m, block_k, gate.device),),
            gate=gate,
            up=up,
            partials=partials,
            y=y,
            **sizes,
            KEEP_OUTPUT=keep_output and number == 0,
            **buffers.pointers(unused=gate),
            **buffers.constants(power_of_two, eps),
            **usage,
            PARTIALS=PARTIALS,
            BLOCK_M=block_m,
            BLOCK_K=block_k,
            num_warps=warps,
        )
    return [*([y] if keep_output else []), *buffers.as_list()]


def swiglu_backward(dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(dgate, dup), contiguous, in gate's shape and dtype."""
    dy, sizes = dy.contiguous(), _sizes(gate, up)
    dgate, dup = (torch.empty(gate.shape, dtype=gate.dtype, device=gate.device) for _ in range(2))
    block_m, block_k, warps = amax_tile(sizes["K"])
    unused = {f"{grad}_{name}": gate for grad in ("gate", "up") for name in ("data", "transpose", "scale_inv")}
    launch(
        swiglu_backward_write_kernel,
        (program_count(sizes["M"], sizes["K"], block_m, block_k, gate.device),),
        dy=dy,
        gate=gate,
        up=up,
        gate_partials=gate,
        up_partials=gate,
        dgate=dgate,
        dup=dup,
        **unused,
        **sizes,
        KEEP_OUTPUT=True,
        **_NO_QUANTIZATION,
        BLOCK_M=block_m,
        BLOCK_K=block_k,
        num_warps=warps,
    )
    return dgate, dup


def swiglu_backward_quantize(
    dy: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    fp8_dtype: torch.dtype,
    rowwise: bool,
    columnwise: bool,
    power_of_two: bool,
    eps: float,
    keep_output: bool,
    tile: Tile | None = None,
) -> list[torch.Tensor]:
    """[dgate?, dup?, *buffers of dgate, *buffers of dup]: `swiglu_backward`, then `quantize` of each."""
    dy, sizes = dy.contiguous(), _sizes(gate, up)
    rows, columns = sizes["M"], sizes["K"]
    partials = {
        f"{grad}_partials": torch.empty(PARTIALS, dtype=torch.float32, device=gate.device) for grad in ("gate", "up")
    }
    block_m, block_k, warps = amax_tile(columns)
    launch(
        swiglu_backward_amax_kernel,
        (PARTIALS,),
        dy=dy,
        gate=gate,
        up=up,
        **partials,
        **sizes,
        BLOCK_M=block_m,
        BLOCK_K=block_k,
        num_warps=warps,
    )
    grads = [torch.empty(gate.shape, dtype=gate.dtype, device=gate.device) for _ in range(2 * keep_output)]
    dgate, dup = grads or (gate, gate)
    gate_buffers, up_buffers = (
        Fp8Buffers(rows, columns, gate.device, fp8_dtype, rowwise, columnwise) for _ in range(2)
    )
    block_m, block_k, warps = tile or cast_tile(rows, columns, columnwise, BACKWARD_TILE)
    for number, usage in enumerate(gate_buffers.launches(gate.element_size())):
        launch(
            swiglu_backward_write_kernel,
            (program_count(rows, columns, block_m, block_k, gate.device),),
            dy=dy,
            gate=gate,
            up=up,
            **partials,
            dgate=dgate,
            dup=dup,
            **sizes,
            KEEP_OUTPUT=keep_output and number == 0,
            **gate_buffers.pointers(unused=gate, prefix="gate_"),
            **up_buffers.pointers(unused=gate, prefix="up_"),
            **gate_buffers.constants(power_of_two, eps),
            **usage,
            PARTIALS=PARTIALS,
            BLOCK_M=block_m,
            BLOCK_K=block_k,
            num_warps=warps,
        )
    return [*grads, *gate_buffers.as_list(), *up_buffers.as_list()]


def _sizes(gate: torch.Tensor, up: torch.Tensor) -> dict[str, Size]:
    """M, K and the row strides as kernel arguments."""
    rows, columns = rows_and_columns(gate)
    return {
        "M": rows,
        "K": columns,
        "gate_stride": _row_stride(gate, "gate"),
        "up_stride": _row_stride(up, "up"),
    }


def _row_stride(x: torch.Tensor, name: str) -> Size:
    """Elements from one row of x read as [M, K] to the next."""
    if x.is_contiguous():
        return x.shape[-1]
    dims = [d for d in range(x.dim() - 1) if x.shape[d] != 1]
    collapse = all(x.stride(a) == x.stride(b) * x.shape[b] for a, b in itertools.pairwise(dims))
    if x.stride(-1) != 1 or not collapse:
        raise ValueError(
            f"swiglu: {name} of shape {tuple(x.shape)} and strides {x.stride()} is not rows of one stride; "
            "make it contiguous"
        )
    return x.stride(dims[-1]) if dims else x.shape[-1]
