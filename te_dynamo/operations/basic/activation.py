"""Activations, one tensor in and one out: GELU, QGELU, ReLU, SReLU, SiLU."""

from __future__ import annotations

from typing import Any, Optional

import torch

from te_dynamo.dialect.activation import activation, activation_backward
from te_dynamo.errors import InvalidOptionError
from te_dynamo.operations.context import OperationContext
from te_dynamo.operations.op import BasicOperation, Params, Saved
from te_dynamo.quantized.tensor_proto import TensorProto

__all__ = ["GELU", "QGELU", "Activation", "ReLU", "SReLU", "SiLU", "gelu_kind"]


class Activation(BasicOperation, abstract=True):
    """y = f(x), element by element. Saves x. Arithmetic in fp32, rounded once to x's dtype."""

    def kind(self) -> str:
        """What te.activation calls f."""
        raise NotImplementedError

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """f(x)."""
        return activation(x.contiguous(), self.kind())

    def backward(self, dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """dy * f'(x)."""
        return activation_backward(dy.contiguous(), x.contiguous(), self.kind())

    def op_forward_compute(self, input: torch.Tensor, params: Params, **_: Any) -> tuple[torch.Tensor, Saved]:
        return self.forward(input), [input]

    def op_forward_save_ctx(self, ctx: OperationContext, tensors_to_save: Saved) -> None:
        ctx.save_for_backward(*tensors_to_save)

    def op_forward_fake(
        self, input: TensorProto, params: tuple[TensorProto, ...], **_: Any
    ) -> tuple[TensorProto, list[Optional[TensorProto]]]:
        return TensorProto(input.shape, input.dtype, device=input.device), [input]

    def op_backward(self, ctx: OperationContext, grad_output: torch.Tensor) -> tuple[Optional[torch.Tensor], tuple[()]]:
        (x,) = ctx.saved_tensors
        assert x is not None
        return self.backward(grad_output, x), ()


class GELU(Activation):
    """x * Phi(x). approximate: "none" (by erf) or "tanh"; InvalidOptionError for another."""

    approximate: str = "none"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.kind()

    def kind(self) -> str:
        return gelu_kind(self, self.approximate)


class QGELU(Activation):
    """x * sigmoid(1.702 x), the quick approximation of GELU."""

    def kind(self) -> str:
        return "quick_gelu"


class ReLU(Activation):
    """max(x, 0)."""

    def kind(self) -> str:
        return "relu"


class SReLU(Activation):
    """max(x, 0)^2, in PyTorch: there is no kernel."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x.to(torch.float32)).square().to(x.dtype)

    def backward(self, dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return (dy.to(torch.float32) * 2 * torch.relu(x.to(torch.float32))).to(x.dtype)


class SiLU(Activation):
    """x * sigmoid(x)."""

    def kind(self) -> str:
        return "silu"


def gelu_kind(op: BasicOperation, approximate: str) -> str:
    """The kind of a GELU, alone or gated; InvalidOptionError for an approximation that there is not."""
    if approximate not in ("none", "tanh"):
        raise InvalidOptionError.unknown(f"{type(op).__name__}.approximate", approximate, ("none", "tanh"))
    return "gelu_tanh" if approximate == "tanh" else "gelu"
