"""Activations, one tensor in and one out: GELU, QGELU, ReLU, SReLU, SiLU."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from te_dynamo.dialect.activation import activation, activation_backward
from te_dynamo.errors import InvalidOptionError
from te_dynamo.operations import types
from te_dynamo.operations.context import OperationContext
from te_dynamo.operations.saves import SavesAll
from te_dynamo.quantized.tensor_proto import TensorProto


class FunctionOfInput(SavesAll, abstract=True):
    """y = f of x alone. Saves x. Arithmetic in fp32, rounded once to x's dtype."""

    name: ClassVar[str]

    def kind(self) -> str:
        """What its te operation calls f: the class's `name`, unless a setting decides."""
        return self.name

    def call(self, x: torch.Tensor, params: types.Params) -> types.TeCall:
        """y of x."""
        raise NotImplementedError

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """y of x."""
        function, arguments = self.call(x, ())
        return function(*arguments)

    def backward(self, dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """dx of x, contiguous."""
        raise NotImplementedError

    def op_backward(self, ctx: OperationContext, grad_output: torch.Tensor) -> types.Backward:
        (x,) = ctx.saved_tensors
        assert x is not None
        return self.backward(grad_output, x.contiguous()), ()


class Activation(FunctionOfInput, abstract=True):
    """y = f(x), element by element."""

    def call(self, x: torch.Tensor, params: types.Params) -> types.TeCall:
        return activation, (x.contiguous(), self.kind())

    def backward(self, dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """dy * f'(x)."""
        return activation_backward(dy.contiguous(), x, self.kind())

    def op_forward_compute(self, input: torch.Tensor, params: types.Params, **_: Any) -> types.Forward:
        return self.forward(input), [input]

    def op_forward_fake(self, input: TensorProto, params: types.Protos, **_: Any) -> types.Fake:
        return TensorProto(input.shape, input.dtype, device=input.device), [input]


class OfGELU(FunctionOfInput, abstract=True):
    """A GELU, alone or gated. approximate: "none" (by erf) or "tanh"; InvalidOptionError for another."""

    approximate: str = "none"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.approximate not in ("none", "tanh"):
            raise InvalidOptionError.unknown(f"{type(self).__name__}.approximate", self.approximate, ("none", "tanh"))

    def kind(self) -> str:
        return "gelu_tanh" if self.approximate == "tanh" else "gelu"


class GELU(OfGELU, Activation):
    """x * Phi(x), approximate "none" (by erf) or "tanh"."""


class QGELU(Activation):
    """x * sigmoid(1.702 x), the quick approximation of GELU."""

    name = "quick_gelu"


class ReLU(Activation):
    """max(x, 0)."""

    name = "relu"


class SReLU(Activation):
    """max(x, 0)^2."""

    name = "relu2"


class SiLU(Activation):
    """x * sigmoid(x)."""

    name = "silu"
