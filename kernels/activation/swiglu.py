"""swiglu(gate, up) = silu(gate) * up, its backward, and both fused with quantization (as
kernels/activation/activation.py).

    dgate = dy * up * s * (1 + gate * (1 - s))        dup = dy * gate * s        s = sigmoid(gate)

gate and up may be halves of one wider tensor: each has a row stride of its own. Backward quantizes dgate
and dup, each with its own scale, in one pair of launches, so that dy, gate and up are read twice and not
four times. Both as halves of one tensor, with one scale: kernels/activation/swiglu_halves.py.
"""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F

from te_dynamo.kernels.activation.swiglu_kernels import (
    swiglu_amax_kernel,
    swiglu_backward_amax_kernel,
    swiglu_backward_write_kernel,
    swiglu_write_kernel,
)
from te_dynamo.kernels.quantize.current import PARTIALS, Tile, amax_tile, cast_tile, quantize_reference
from te_dynamo.kernels.quantize.stacked import stack_buffers
from te_dynamo.kernels.runtime.dependent_launch import starts_early
from te_dynamo.kernels.runtime.launch import launch
from te_dynamo.kernels.tiles.fp8 import (
    Fp8Buffers,
    Size,
    program_count,
    rows_and_columns,
)

__all__ = [
    "in_rows",
    "launch_gradients",
    "partial_amaxes_of_gradients",
    "sizes_of",
    "swiglu",
    "swiglu_backward",
    "swiglu_backward_quantize",
    "swiglu_backward_quantize_reference",
    "swiglu_backward_reference",
    "swiglu_partial_amaxes",
    "swiglu_quantize",
    "swiglu_quantize_reference",
    "swiglu_reference",
]


FORWARD_TILE: Tile = (128, 64, 4)
BACKWARD_TILE: Tile = (128, 64, 8)
"""Tiles of the cast launches: the fastest on an H200 at 8192x14336 (benchmarks/quantize.py --sweep)."""


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
    amax: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """`swiglu_quantize` in plain PyTorch."""
    y = swiglu_reference(gate, up)
    return [
        *([y] if keep_output else []),
        *quantize_reference(y, fp8_dtype, rowwise, columnwise, power_of_two, eps, amax),
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
    stacked: bool = False,
) -> list[torch.Tensor]:
    """`swiglu_backward_quantize` in plain PyTorch."""
    grads = swiglu_backward_reference(dy, gate, up)
    each = [quantize_reference(grad, fp8_dtype, rowwise, columnwise, power_of_two, eps) for grad in grads]
    buffers = stack_buffers(each, rowwise, columnwise, by_columns=True) if stacked else [*each[0], *each[1]]
    return [*(grads if keep_output else ()), *buffers]


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

    gate and up have rank >= 2. One whose rows are not contiguous, or not of one stride (in_rows), is copied.
    """
    gate, up = in_rows(gate), in_rows(up)
    sizes = sizes_of(gate, up)
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
        EARLY=False,
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
    amax: torch.Tensor | None = None,
    tile: Tile | None = None,
) -> list[torch.Tensor]:
    """[swiglu(gate, up)?, data?, transpose?, scale_inv], equal to `swiglu` then `quantize`.

    amax (fp32, a power of two of partial ones), where the caller knows it, saves a launch and a read of both. `tile`
    overrides the cast's.
    """
    gate, up = in_rows(gate), in_rows(up)
    sizes = sizes_of(gate, up)
    rows, columns = sizes["M"], sizes["K"]
    partials = swiglu_partial_amaxes(gate, up) if amax is None else amax
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
            PARTIALS=partials.shape[0],
            EARLY=starts_early(rows, gate.device),
            BLOCK_M=block_m,
            BLOCK_K=block_k,
            num_warps=warps,
        )
    return [*([y] if keep_output else []), *buffers.as_list()]


def swiglu_partial_amaxes(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """fp32 [PARTIALS], whose maximum is the amax of `swiglu(gate, up)`."""
    sizes = sizes_of(gate, up)
    partials = torch.empty(PARTIALS, dtype=torch.float32, device=gate.device)
    block_m, block_k, warps = amax_tile(sizes["K"])
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
    return partials


def swiglu_backward(dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(dgate, dup), contiguous, in gate's shape and dtype."""
    dy, gate, up = dy.contiguous(), in_rows(gate), in_rows(up)
    sizes = sizes_of(gate, up)
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
        STACKED=False,
        GATE_HALF=-1,
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
    stacked: bool = False,
    tile: Tile | None = None,
) -> list[torch.Tensor]:
    """[dgate?, dup?, *buffers of dgate, *buffers of dup]: `swiglu_backward`, then `quantize` of each.

    stacked: in place of two tensors' buffers those of `quantize_stacked([dgate, dup], by_columns=True)`.
    """
    dy, gate, up = dy.contiguous(), in_rows(gate), in_rows(up)
    rows, columns = rows_and_columns(gate)
    partials = partial_amaxes_of_gradients(dy, gate, up)
    grads = [torch.empty(gate.shape, dtype=gate.dtype, device=gate.device) for _ in range(2 * keep_output)]
    dgate, dup = grads or (gate, gate)
    gate_buffers, *rest = (
        Fp8Buffers(rows, width, gate.device, fp8_dtype, rowwise, columnwise, scales)
        for width, scales in ([(2 * columns, 2)] if stacked else [(columns, 1), (columns, 1)])
    )
    up_pointers = (
        rest[0].pointers(unused=gate, prefix="up_")
        if rest
        else {"up_data": gate, "up_transpose": gate, "up_scale_inv": gate}
    )
    launch_gradients(
        {"dy": dy, "gate": gate, "up": up, **partials, "dgate": dgate, "dup": dup, **up_pointers},
        gate_buffers,
        {"STACKED": stacked, "GATE_HALF": -1, **gate_buffers.constants(power_of_two, eps)},
        keep_output,
        tile,
    )
    return [*grads, *gate_buffers.as_list(), *(buffer for buffers in rest for buffer in buffers.as_list())]


def partial_amaxes_of_gradients(
    dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, together: bool = False
) -> dict[str, torch.Tensor]:
    """gate_partials and up_partials, fp32 [PARTIALS], whose maxima are the amaxes of dgate and dup; dy is contiguous.

    together: the amax of both in gate_partials, and a stand-in for up_partials.
    """
    sizes = sizes_of(gate, up)
    gate_partials = torch.empty(PARTIALS, dtype=torch.float32, device=gate.device)
    partials = {"gate_partials": gate_partials, "up_partials": gate if together else torch.empty_like(gate_partials)}
    block_m, block_k, warps = amax_tile(sizes["K"])
    launch(
        swiglu_backward_amax_kernel,
        (PARTIALS,),
        dy=dy,
        gate=gate,
        up=up,
        **partials,
        **sizes,
        ONE_AMAX=together,
        BLOCK_M=block_m,
        BLOCK_K=block_k,
        num_warps=warps,
    )
    return partials


def launch_gradients(
    tensors: dict[str, torch.Tensor],
    buffers: Fp8Buffers,
    constants: dict[str, object],
    keep_output: bool,
    tile: Tile | None,
) -> None:
    """The launches of `swiglu_backward_write_kernel` that write `buffers`, gate's. tensors: its other ones by name."""
    gate = tensors["gate"]
    sizes = sizes_of(gate, tensors["up"])
    rows, columns = sizes["M"], sizes["K"]
    block_m, block_k, warps = tile or cast_tile(rows, columns, buffers.transpose is not None, BACKWARD_TILE)
    for number, usage in enumerate(buffers.launches(gate.element_size())):
        launch(
            swiglu_backward_write_kernel,
            (program_count(rows, columns, block_m, block_k, gate.device),),
            **tensors,
            **sizes,
            KEEP_OUTPUT=keep_output and number == 0,
            **buffers.pointers(unused=gate, prefix="gate_"),
            **constants,
            **usage,
            PARTIALS=PARTIALS,
            BLOCK_M=block_m,
            BLOCK_K=block_k,
            num_warps=warps,
        )


def sizes_of(gate: torch.Tensor, up: torch.Tensor) -> dict[str, Size]:
    """M, K and the row strides as kernel arguments."""
    rows, columns = rows_and_columns(gate)
    return {
        "M": rows,
        "K": columns,
        "gate_stride": _row_stride(gate, "gate"),
        "up_stride": _row_stride(up, "up"),
    }


def in_rows(x: torch.Tensor) -> torch.Tensor:
    """x where its rows are contiguous and of one stride, as the kernels read them; else a copy."""
    return x if x.is_contiguous() or _rows_collapse(x) else x.contiguous()


def _rows_collapse(x: torch.Tensor) -> bool:
    dims = _leading(x)
    collapse = all(x.stride(a) == x.stride(b) * x.shape[b] for a, b in itertools.pairwise(dims))
    return bool(x.stride(-1) == 1 and collapse)


def _leading(x: torch.Tensor) -> list[int]:
    """The dimensions before the last whose strides matter."""
    return [d for d in range(x.dim() - 1) if x.shape[d] != 1]


def _row_stride(x: torch.Tensor, name: str) -> Size:
    """Elements from one row of x read as [M, K] to the next."""
    if x.is_contiguous():
        return x.shape[-1]
    if not _rows_collapse(x):
        raise ValueError(
            f"swiglu: {name} of shape {tuple(x.shape)} and strides {x.stride()} is not rows of one stride; "
            "make it contiguous"
        )
    dims = _leading(x)
    return x.stride(dims[-1]) if dims else x.shape[-1]
