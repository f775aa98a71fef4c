"""Gated activations: y [..., N] = f(a) * b of x [..., 2N] = [a, b].

The **first** half goes through the activation and the second is its factor, as in Transformer Engine (torch.nn.functional.glu gates
with the second half).
"""

from __future__ import annotations

from typing import Any

import torch

from te_dynamo.dialect.gated import gated, gated_backward
from te_dynamo.errors import InputError
from te_dynamo.operations import types
from te_dynamo.operations.basic.activation import FunctionOfInput, OfGELU
from te_dynamo.operations.op import BasicOperation
from te_dynamo.quantized.tensor_proto import TensorProto


class Gated(FunctionOfInput, abstract=True):
    """y = f(a) * b, x = [a, b] along the last dimension."""

    def call(self, x: torch.Tensor, params: types.Params) -> types.TeCall:
        return gated, (*x.chunk(2, -1), self.kind())

    def backward(self, dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """dx = [dy * b * f'(a), dy * f(a)]."""
        return torch.cat(gated_backward(dy.contiguous(), *x.chunk(2, -1), self.kind()), -1)

    def op_forward_compute(self, input: torch.Tensor, params: types.Params, **_: Any) -> types.Forward:
        half_of(self, input.shape)
        return self.forward(input.contiguous()), [input]

    def op_forward_fake(self, input: TensorProto, params: types.Protos, **_: Any) -> types.Fake:
        return TensorProto(half_of(self, input.shape), input.dtype, device=input.device), [input]


def half_of(op: BasicOperation, shape: tuple[int, ...]) -> tuple[int, ...]:
    """[..., N] of [..., 2N]. Raises InputError for an odd last dimension."""
    if not shape or shape[-1] % 2:
        raise InputError(f"{type(op).__name__}: expected an input [..., 2N], got {list(shape)}")
    return (*shape[:-1], shape[-1] // 2)


class GLU(Gated):
    """sigmoid(a) * b."""

    name = "sigmoid"


class GEGLU(OfGELU, Gated):
    """gelu(a) * b, approximate "none" (by erf) or "tanh"."""


class QGEGLU(Gated):
    """a * sigmoid(1.702 a) * b."""

    name = "quick_gelu"


class ReGLU(Gated):
    """max(a, 0) * b."""

    name = "relu"


class SReGLU(Gated):
    """max(a, 0)^2 * b, in PyTorch: there is no kernel."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = x.to(torch.float32).chunk(2, -1)
        return (torch.relu(a).square() * b).to(x.dtype)

    def backward(self, dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        a, b = x.to(torch.float32).chunk(2, -1)
        dy32, positive = dy.to(torch.float32), torch.relu(a)
        return torch.cat((dy32 * b * 2 * positive, dy32 * positive.square()), -1).to(x.dtype)


class SwiGLU(Gated):
    """silu(a) * b."""

    name = "silu"


class ClampedSwiGLU(Gated):
    """a' * sigmoid(alpha a') * (b' + offset), a' = min(a, limit), b' = clamp(b, -limit, limit): the MLP of GPT-OSS."""

    limit: float = 7.0
    alpha: float = 1.702
    offset: float = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = x.to(torch.float32).chunk(2, -1)
        a, b = a.clamp(max=self.limit), b.clamp(-self.limit, self.limit)
        return (a * torch.sigmoid(self.alpha * a) * (b + self.offset)).to(x.dtype)

    def backward(self, dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Nothing flows where a value is outside of its limits; at a limit it does, as in torch.clamp."""
        a, b = x.to(torch.float32).chunk(2, -1)
        clamped_a, clamped_b = a.clamp(max=self.limit), b.clamp(-self.limit, self.limit)
        s = torch.sigmoid(self.alpha * clamped_a)
        dy32 = dy.to(torch.float32)
        da = dy32 * (clamped_b + self.offset) * s * (1 + self.alpha * clamped_a * (1 - s)) * (a <= self.limit)
        db = dy32 * clamped_a * s * (b.abs() <= self.limit)
        return torch.cat((da, db), -1).to(x.dtype)
