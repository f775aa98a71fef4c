"""Activations times a scale for each row, which comes as an extra input: what a mixture of experts does with its probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional

import torch

from te_dynamo.errors import InputError
from te_dynamo.operations import types
from te_dynamo.operations.basic.activation import Activation, SReLU
from te_dynamo.operations.basic.gated import Gated, SwiGLU, half_of
from te_dynamo.operations.context import OperationContext
from te_dynamo.operations.op import BasicOperation
from te_dynamo.operations.saves import FuserSavesAll
from te_dynamo.quantized.tensor_proto import TensorProto


class Scaled(FuserSavesAll, BasicOperation, abstract=True):
    """y [..., N] = f(x) * scales [..., None]. Extra input: scales, of x's leading dimensions. Saves x and scales.

    dscales = sum over N of dy * f(x), in fp32; f(x) is computed again.
    """

    num_extra_inputs = 1

    def activation(self) -> Activation | Gated:
        """f."""
        raise NotImplementedError

    def fuser_forward_compute(
        self, input: torch.Tensor, params: Sequence[types.Params], extra_inputs: Sequence[types.Params], **_: Any
    ) -> types.FuserForward:
        ((scales,),) = extra_inputs
        self._check_scales(input.shape, scales.shape)
        y = self.activation().forward(input.contiguous())
        scaled = y.to(torch.float32) * scales.to(torch.float32).unsqueeze(-1)
        return scaled.to(input.dtype), [()], [[input, scales]]

    def fuser_forward_fake(
        self, input: TensorProto, params: Sequence[types.Protos], extra_inputs: Sequence[types.Protos], **_: Any
    ) -> types.FuserFake:
        ((scales,),) = extra_inputs
        self._check_scales(input.shape, scales.shape)
        shape = half_of(self, input.shape) if isinstance(self.activation(), Gated) else input.shape
        return TensorProto(shape, input.dtype, device=input.device), [()], [[input, scales]]

    def fuser_backward(
        self, ctxs: Sequence[OperationContext], grad_output: torch.Tensor, grad_extra_outputs: Sequence[types.Grads]
    ) -> types.FuserBackward:
        x, scales = ctxs[0].saved_tensors
        assert x is not None and scales is not None
        dx = None
        if ctxs[0].requires_grad.input:
            dx = self.activation().backward(self.activation_gradient(grad_output, scales), x.contiguous())
        return dx, [()], [(self.scales_gradient(ctxs[0], grad_output),)]

    def _check_scales(self, input: tuple[int, ...], scales: tuple[int, ...]) -> None:
        if tuple(scales) != tuple(input[:-1]):
            raise InputError(
                f"{self.describe()}: expected a scale for each row, {list(input[:-1])}, got {list(scales)}"
            )

    def activation_gradient(self, grad_output: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """The gradient of f(x)."""
        return (grad_output.to(torch.float32) * scales.to(torch.float32).unsqueeze(-1)).to(grad_output.dtype)

    def scales_gradient(self, ctx: OperationContext, grad_output: torch.Tensor) -> Optional[torch.Tensor]:
        """None where it is not needed."""
        x, scales = ctx.saved_tensors
        assert x is not None and scales is not None
        if not ctx.requires_grad.extra_inputs[0]:
            return None
        y = self.activation().forward(x.contiguous())
        return (grad_output.to(torch.float32) * y.to(torch.float32)).sum(-1).to(scales.dtype)


class ScaledSwiGLU(Scaled):
    """silu(a) * b * scales of x [..., 2N] = [a, b]."""

    def activation(self) -> Gated:
        return SwiGLU()


class ScaledSReLU(Scaled):
    """max(x, 0)^2 * scales."""

    def activation(self) -> Activation:
        return SReLU()
