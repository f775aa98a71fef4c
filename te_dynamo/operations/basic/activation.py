"""Activations, one tensor in and one out: GELU, QGELU, ReLU, SReLU, SiLU."""

from __future__ import annotations

from typing import Any, Optional

import torch

from te_dynamo.operations.context import OperationContext
from te_dynamo.operations.op import BasicOperation, Params, Saved
from te_dynamo.ops.activation import activation, activation_backward
from te_dynamo.tensor_proto import TensorProto

__all__ = ["GELU", "QGELU", "Activation", "ReLU", "SReLU", "SiLU"]


class Activation(BasicOperation, abstract=True):
    """y = f(x), element by element. Saves x. Arithmetic in fp32, rounded once to x's dtype."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """f(x)."""
        raise NotImplementedError

    def backward(self, dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """dy * f'(x)."""
        raise NotImplementedError

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


class _Dialect(Activation, abstract=True):
    """By te.activation, which has kernels, alone and fused with quantization."""

    def kind(self) -> str:
        """What te.activation calls it."""
        raise NotImplementedError

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return activation(x.contiguous(), self.kind())

    def backward(self, dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return activation_backward(dy.contiguous(), x.contiguous(), self.kind())


class GELU(_Dialect):
    """x * Phi(x). approximate: "none" (by erf) or "tanh"; ValueError for another."""

    approximate: str = "none"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.approximate not in ("none", "tanh"):
            raise ValueError(f"GELU: approximate is 'none' or 'tanh', got {self.approximate!r}")

    def kind(self) -> str:
        return "gelu_tanh" if self.approximate == "tanh" else "gelu"


class ReLU(_Dialect):
    """max(x, 0)."""

    def kind(self) -> str:
        return "relu"


class SiLU(_Dialect):
    """x * sigmoid(x)."""

    def kind(self) -> str:
        return "silu"


class _Formula(Activation, abstract=True):
    """By a formula in fp32 that Inductor compiles."""

    def value(self, x: torch.Tensor) -> torch.Tensor:
        """f(x), x in fp32."""
        raise NotImplementedError

    def derivative(self, x: torch.Tensor) -> torch.Tensor:
        """f'(x), x in fp32."""
        raise NotImplementedError

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.value(x.to(torch.float32)).to(x.dtype)

    def backward(self, dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return (dy.to(torch.float32) * self.derivative(x.to(torch.float32))).to(x.dtype)


class QGELU(_Formula):
    """x * sigmoid(1.702 x), the quick approximation of GELU."""

    def value(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(1.702 * x)

    def derivative(self, x: torch.Tensor) -> torch.Tensor:
        s = torch.sigmoid(1.702 * x)
        return s + 1.702 * x * s * (1 - s)


class SReLU(_Formula):
    """max(x, 0)^2."""

    def value(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x).square()

    def derivative(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * torch.relu(x)
