"""Activations: `te.gelu`, `te.quick_gelu`, `te.silu`, `te.relu`, `te.relu2`, their gradients, and each of them with a quantized result.

The user's function at Torch IR (te.gelu) becomes `te.activation(x, kind)` in the dialect, one operation with one kernel
for every kind. All arithmetic is in fp32 with one rounding to x's dtype.
"""

from collections.abc import Callable
from typing import Any

import torch

from te_dynamo.dialect.define import KERNELS, expand_in_compiler, te_op
from te_dynamo.dialect.fakes import column_sums, like, quantized
from te_dynamo.dialect.quantize import takes_quantizer
from te_dynamo.kernels.activation import activation as kernels
from te_dynamo.quantized.quantizers import Quantizer

# The dialect.


@te_op(reference=kernels.activation_reference, kernel=kernels.activation)
def activation(x: torch.Tensor, kind: str) -> torch.Tensor:
    """kind(x): "gelu" (erf), "gelu_tanh", "quick_gelu", "silu", "relu" or "relu2"."""
    return like(x)


@te_op(reference=kernels.activation_backward_reference, kernel=kernels.activation_backward)
def activation_backward(dy: torch.Tensor, x: torch.Tensor, kind: str) -> torch.Tensor:
    """dy * kind'(x)."""
    return like(x)


# The user's functions, with their gradients.


def _save_x(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(inputs[0])


def _gelu_kind(approximate: str) -> str:
    return "gelu_tanh" if approximate == "tanh" else "gelu"


def _gelu(x: torch.Tensor, approximate: str) -> torch.Tensor:
    return activation(x, _gelu_kind(approximate))


def _gelu_setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.kind = _gelu_kind(inputs[1])
    _save_x(ctx, inputs, output)


def _gelu_backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
    return activation_backward(dy.contiguous(), *ctx.saved_tensors, ctx.kind), None


@te_op(reference=_gelu, setup_context=_gelu_setup, backward=_gelu_backward)
def gelu(x: torch.Tensor, approximate: str) -> torch.Tensor:
    """GELU by erf (approximate "none") or by tanh ("tanh")."""
    return like(x)


def _of_kind(kind: str) -> dict[str, Callable[..., Any]]:
    """What `te_op` takes for te.activation of one kind, as a function of x alone."""

    def reference(x: torch.Tensor) -> torch.Tensor:
        return activation(x, kind)

    def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
        return activation_backward(dy.contiguous(), *ctx.saved_tensors, kind)

    return {"reference": reference, "setup_context": _save_x, "backward": backward}


@te_op(**_of_kind("quick_gelu"))
def quick_gelu(x: torch.Tensor) -> torch.Tensor:
    """x * sigmoid(1.702 x), the approximation of GELU that CLIP uses."""
    return like(x)


@te_op(**_of_kind("silu"))
def silu(x: torch.Tensor) -> torch.Tensor:
    """x * sigmoid(x)."""
    return like(x)


@te_op(**_of_kind("relu"))
def relu(x: torch.Tensor) -> torch.Tensor:
    """max(x, 0)."""
    return like(x)


@te_op(**_of_kind("relu2"))
def relu2(x: torch.Tensor) -> torch.Tensor:
    """max(x, 0)^2, squared ReLU (Nemotron, NanoChat)."""
    return like(x)


for _overload in (gelu, quick_gelu, silu, relu, relu2):
    expand_in_compiler(_overload, KERNELS[_overload])


# With the result quantized: what fusion makes.


@te_op(
    reference=takes_quantizer(kernels.activation_quantize_reference),
    kernel=takes_quantizer(kernels.activation_quantize),
)
def activation_quantize(x: torch.Tensor, kind: str, quantizer: Quantizer, keep_output: bool) -> list[torch.Tensor]:
    """[y if keep_output, *buffers]: y = te.activation(x, kind), buffers = te.quantize(y)."""
    return ([like(x)] if keep_output else []) + quantized(x, quantizer)


@te_op(
    reference=takes_quantizer(kernels.activation_backward_quantize_reference),
    kernel=takes_quantizer(kernels.activation_backward_quantize),
)
def activation_backward_quantize(
    dy: torch.Tensor, x: torch.Tensor, kind: str, quantizer: Quantizer, keep_output: bool, bias_grad: bool
) -> list[torch.Tensor]:
    """[dx if keep_output, te.bias_grad(dx) if bias_grad, *te.quantize(dx)] of dx = te.activation_backward(dy, x, kind)."""
    kept = [like(x)] if keep_output else []
    sums = [column_sums(x)] if bias_grad else []
    return kept + sums + quantized(x, quantizer)
