"""`te.swiglu(gate, up) = silu(gate) * up`, its gradients, and each of them with a quantized result."""

from typing import Any, Optional

import torch

from te_dynamo.dialect.define import te_op
from te_dynamo.dialect.fakes import like, plain, quantized, quantized_stack
from te_dynamo.dialect.quantize import takes_quantizer
from te_dynamo.kernels.activation import swiglu as kernels
from te_dynamo.kernels.activation import swiglu_halves
from te_dynamo.kernels.tiles.fp8 import rows_and_columns
from te_dynamo.quantized.quantizers import Quantizer

__all__ = [
    "swiglu",
    "swiglu_backward",
    "swiglu_backward_quantize",
    "swiglu_backward_quantize_halves",
    "swiglu_quantize",
]


@te_op(reference=kernels.swiglu_backward_reference, kernel=kernels.swiglu_backward)
def swiglu_backward(dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(dgate, dup) of silu(gate) * up."""
    return like(gate), like(up)


def _swiglu_setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _swiglu_backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return swiglu_backward(dy.contiguous(), *ctx.saved_tensors)


@te_op(
    reference=kernels.swiglu_reference,
    kernel=kernels.swiglu,
    setup_context=_swiglu_setup,
    backward=_swiglu_backward,
)
def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, equal shapes and dtypes."""
    return like(gate)


@te_op(
    reference=takes_quantizer(kernels.swiglu_quantize_reference),
    kernel=takes_quantizer(kernels.swiglu_quantize),
)
def swiglu_quantize(
    gate: torch.Tensor,
    up: torch.Tensor,
    quantizer: Quantizer,
    keep_output: bool,
    amax: Optional[torch.Tensor] = None,
) -> list[torch.Tensor]:
    """[y if keep_output, *buffers]: y = te.swiglu(gate, up), buffers = te.quantize(y).

    amax: partial ones of y, fp32 [a power of two], where they are known already.
    """
    return ([like(gate)] if keep_output else []) + quantized(gate, quantizer)


@te_op(
    reference=takes_quantizer(kernels.swiglu_backward_quantize_reference),
    kernel=takes_quantizer(kernels.swiglu_backward_quantize),
)
def swiglu_backward_quantize(
    dy: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    quantizer: Quantizer,
    keep_output: bool,
    stacked: bool = False,
) -> list[torch.Tensor]:
    """[dgate, dup if keep_output, *te.quantize(dgate), *te.quantize(dup)], both with the same quantizer.

    stacked: the buffers of te.quantize_stacked([dgate, dup], by_columns=True) in their place.
    """
    kept = [like(gate), like(up)] if keep_output else []
    if stacked:
        rows, columns = rows_and_columns(gate)
        return kept + quantized_stack(gate, (rows, 2 * columns), 2, quantizer)
    return kept + quantized(gate, quantizer) + quantized(up, quantizer)


@te_op(
    reference=takes_quantizer(swiglu_halves.swiglu_backward_quantize_halves_reference),
    kernel=takes_quantizer(swiglu_halves.swiglu_backward_quantize_halves),
)
def swiglu_backward_quantize_halves(
    dy: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    quantizer: Quantizer,
    keep_output: bool,
    gate_first: bool,
) -> list[torch.Tensor]:
    """[grad if keep_output, *te.quantize(grad)]: grad [..., 2K] = [dgate, dup], or [dup, dgate] without gate_first; one scale."""
    grad = plain((*gate.shape[:-1], 2 * gate.shape[-1]), gate.dtype, gate)
    return ([grad] if keep_output else []) + quantized(grad, quantizer)
