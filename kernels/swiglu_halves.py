"""Both gradients of swiglu as one tensor with one scale: what the linear wants whose result's halves gate and up are.

    grad [M, 2K] = [dgate, dup], or [dup, dgate], then `quantize`

The launches of kernels/swiglu.py, with one amax for both; grad itself is written only if it is asked for.
"""

from __future__ import annotations

import torch

from te_dynamo.kernels.fp8 import Fp8Buffers, program_count
from te_dynamo.kernels.launch import launch
from te_dynamo.kernels.quantize import PARTIALS, Tile, amax_tile, cast_tile, quantize_reference
from te_dynamo.kernels.swiglu import BACKWARD_TILE, in_rows, sizes_of, swiglu_backward_reference
from te_dynamo.kernels.swiglu_kernels import swiglu_backward_amax_kernel, swiglu_backward_write_kernel

__all__ = [
    "partial_amaxes_of_halves",
    "swiglu_backward_quantize_halves",
    "swiglu_backward_quantize_halves_reference",
]


def swiglu_backward_quantize_halves_reference(
    dy: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    fp8_dtype: torch.dtype,
    rowwise: bool,
    columnwise: bool,
    power_of_two: bool,
    eps: float,
    keep_output: bool,
    gate_first: bool,
) -> list[torch.Tensor]:
    """`swiglu_backward_quantize_halves` in plain PyTorch."""
    dgate, dup = swiglu_backward_reference(dy, gate, up)
    grad = torch.cat([dgate, dup] if gate_first else [dup, dgate], -1)
    buffers = quantize_reference(grad, fp8_dtype, rowwise, columnwise, power_of_two, eps)
    return [*([grad] if keep_output else []), *buffers]


def swiglu_backward_quantize_halves(
    dy: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    fp8_dtype: torch.dtype,
    rowwise: bool,
    columnwise: bool,
    power_of_two: bool,
    eps: float,
    keep_output: bool,
    gate_first: bool,
    tile: Tile | None = None,
) -> list[torch.Tensor]:
    """[grad?, data?, transpose?, scale_inv]: `swiglu_backward`, its results side by side, then `quantize`.

    grad [..., 2K] = [dgate, dup] with gate_first, else [dup, dgate].
    """
    dy, gate, up = dy.contiguous(), in_rows(gate), in_rows(up)
    sizes = sizes_of(gate, up)
    rows, columns = sizes["M"], sizes["K"]
    partials = partial_amaxes_of_halves(dy, gate, up)
    shape = (*gate.shape[:-1], 2 * columns)
    grad = torch.empty(shape, dtype=gate.dtype, device=gate.device) if keep_output else gate
    buffers = Fp8Buffers(rows, 2 * columns, gate.device, fp8_dtype, rowwise, columnwise)
    block_m, block_k, warps = tile or cast_tile(rows, columns, columnwise, BACKWARD_TILE)
    for number, usage in enumerate(buffers.launches(gate.element_size())):
        launch(
            swiglu_backward_write_kernel,
            (program_count(rows, columns, block_m, block_k, gate.device),),
            dy=dy,
            gate=gate,
            up=up,
            **partials,
            dgate=grad,
            dup=gate,
            up_data=gate,
            up_transpose=gate,
            up_scale_inv=gate,
            **sizes,
            KEEP_OUTPUT=keep_output and number == 0,
            STACKED=False,
            GATE_HALF=int(not gate_first),
            **buffers.pointers(unused=gate, prefix="gate_"),
            **buffers.constants(power_of_two, eps),
            **usage,
            PARTIALS=PARTIALS,
            BLOCK_M=block_m,
            BLOCK_K=block_k,
            num_warps=warps,
        )
    return [*([grad] if keep_output else []), *buffers.as_list()]


def partial_amaxes_of_halves(dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> dict[str, torch.Tensor]:
    """gate_partials, fp32 [PARTIALS], whose maximum is the amax of dgate and dup, and a stand-in for up_partials."""
    sizes = sizes_of(gate, up)
    partials = {
        "gate_partials": torch.empty(PARTIALS, dtype=torch.float32, device=gate.device),
        "up_partials": gate,
    }
    block_m, block_k, warps = amax_tile(sizes["K"])
    launch(
        swiglu_backward_amax_kernel,
        (PARTIALS,),
        dy=dy,
        gate=gate,
        up=up,
        **partials,
        **sizes,
        ONE_AMAX=True,
        BLOCK_M=block_m,
        BLOCK_K=block_k,
        num_warps=warps,
    )
    return partials
