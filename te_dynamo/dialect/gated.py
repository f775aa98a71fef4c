"""`te.gated(gate, up, kind) = f(gate) * up`, its gradients, and each of them with a quantized result.

The kinds of f are those of `te.activation`, "sigmoid" and, of a bilinear unit, "identity".
"""

from collections.abc import Callable
from typing import Any, Optional

import torch

from te_dynamo.dialect.define import te_op
from te_dynamo.dialect.fakes import like, plain, quantized, quantized_stack
from te_dynamo.dialect.quantize import takes_quantizer
from te_dynamo.errors import QuantizationError
from te_dynamo.kernels.activation import gated as kernels
from te_dynamo.kernels.activation import gated_halves
from te_dynamo.kernels.activation.gated import BOUNDED_KINDS as BOUNDED_KINDS
from te_dynamo.kernels.activation.gated import KINDS as KINDS
from te_dynamo.kernels.layouts.sizes import rows_and_columns
from te_dynamo.quantized.quantizers import Quantizer


@te_op(reference=kernels.gated_backward_reference, kernel=kernels.gated_backward)
def gated_backward(
    dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, kind: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """(dgate, dup) of f(gate) * up."""
    return like(gate), like(up)


def _gated_setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    gate, up, ctx.kind = inputs
    ctx.save_for_backward(gate, up)


def _gated_backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
    return *gated_backward(dy.contiguous(), *ctx.saved_tensors, ctx.kind), None


@te_op(
    reference=kernels.gated_reference,
    kernel=kernels.gated,
    setup_context=_gated_setup,
    backward=_gated_backward,
)
def gated(gate: torch.Tensor, up: torch.Tensor, kind: str) -> torch.Tensor:
    """f(gate) * up, equal shapes and dtypes. kind: "gelu" (erf), "gelu_tanh", "quick_gelu", "silu", "relu", "sigmoid" or "identity"."""
    return like(gate)


@te_op(
    reference=takes_quantizer(kernels.gated_quantize_reference),
    kernel=takes_quantizer(kernels.gated_quantize),
)
def gated_quantize(
    gate: torch.Tensor,
    up: torch.Tensor,
    kind: str,
    quantizer: Quantizer,
    keep_output: bool,
    amax: Optional[torch.Tensor] = None,
) -> list[torch.Tensor]:
    """[y if keep_output, *buffers]: y = te.gated(gate, up, kind), buffers = te.quantize(y).

    amax: partial ones of y, fp32 [a power of two], where they are known already.
    """
    return ([like(gate)] if keep_output else []) + quantized(gate, quantizer)


def _check_stack(quantizer: Quantizer, stacked: bool) -> None:
    if stacked and not quantizer.one_scale:
        raise QuantizationError(
            f"te.gated_backward_quantize: {quantizer.describe()}: stacked=True takes one scale a tensor; without it each gradient has buffers"
        )


def _stacks(implementation: Callable[..., Any]) -> Callable[..., Any]:
    """A launcher or reference of te.gated_backward_quantize."""
    run = takes_quantizer(implementation)

    def checked(*args: Any, **hint: torch.Tensor) -> Any:
        _check_stack(args[4], any(args[6:]))
        return run(*args, **hint)

    return checked


@te_op(
    reference=_stacks(kernels.gated_backward_quantize_reference),
    kernel=_stacks(kernels.gated_backward_quantize),
)
def gated_backward_quantize(
    dy: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    kind: str,
    quantizer: Quantizer,
    keep_output: bool,
    stacked: bool = False,
) -> list[torch.Tensor]:
    """[dgate, dup if keep_output, *te.quantize(dgate), *te.quantize(dup)], both with the same quantizer.

    stacked: the buffers of te.quantize_stacked([dgate, dup], by_columns=True) in their place.
    """
    _check_stack(quantizer, stacked)
    kept = [like(gate), like(up)] if keep_output else []
    if stacked:
        rows, columns = rows_and_columns(gate.shape)
        return kept + quantized_stack(gate, (rows, 2 * columns), 2, quantizer)
    return kept + quantized(gate, quantizer) + quantized(up, quantizer)


@te_op(
    reference=takes_quantizer(gated_halves.gated_backward_quantize_halves_reference),
    kernel=takes_quantizer(gated_halves.gated_backward_quantize_halves),
)
def gated_backward_quantize_halves(
    dy: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    kind: str,
    quantizer: Quantizer,
    keep_output: bool,
    gate_first: bool,
) -> list[torch.Tensor]:
    """[grad if keep_output, *te.quantize(grad)]: grad [..., 2K] = [dgate, dup], or [dup, dgate] without gate_first; one scale."""
    grad = plain((*gate.shape[:-1], 2 * gate.shape[-1]), gate.dtype, gate)
    return ([grad] if keep_output else []) + quantized(grad, quantizer)
