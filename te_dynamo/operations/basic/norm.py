"""Norms over the last dimension: LayerNorm, RMSNorm, L2Normalization."""

from __future__ import annotations

import math
from typing import Any, Optional

import torch

from te_dynamo.dialect.norm import layer_norm, layer_norm_gradients, rms_norm, rms_norm_gradients
from te_dynamo.operations import types
from te_dynamo.operations.checks import check_settings, check_width
from te_dynamo.operations.context import OperationContext
from te_dynamo.operations.op import Parameter
from te_dynamo.operations.saves import SavesAll
from te_dynamo.quantized.tensor_proto import TensorProto


class _OfFeatures(SavesAll, abstract=True):
    """A norm whose parameters have an element for each of the last dimension's `features`."""

    features: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check_settings(self, "features")

    def check_input(self, input: TensorProto) -> None:
        check_width(self, input.shape, self.features)

    def call(self, x: torch.Tensor, params: types.Params) -> types.TeCall:
        """(y, statistics)."""
        raise NotImplementedError

    def op_forward_compute(self, input: torch.Tensor, params: types.Params, **_: Any) -> types.Forward:
        function, arguments = self.call(input, params)
        output, *statistics = function(*arguments)
        return output, [input, params[0], *statistics]


class LayerNorm(_OfFeatures):
    """y = (x - mean) * rsqrt(var + eps) * weight + bias, [..., features]. Saves x, the weight, mean and rstd."""

    eps: float = 1e-5

    def parameters(self) -> tuple[Parameter, ...]:
        shape = (self.features,)
        return Parameter("weight", shape, torch.nn.init.ones_), Parameter("bias", shape, torch.nn.init.zeros_)

    def call(self, x: torch.Tensor, params: types.Params) -> types.TeCall:
        return layer_norm, (x.contiguous(), *params, self.eps)

    def op_forward_fake(self, input: TensorProto, params: types.Protos, **_: Any) -> types.Fake:
        output = TensorProto(input.shape, input.dtype, device=input.device)
        return output, [input, params[0], _statistic(input), _statistic(input)]

    def op_backward(self, ctx: OperationContext, grad_output: torch.Tensor) -> types.Backward:
        x, weight, mean, rstd = ctx.saved_tensors
        assert x is not None and mean is not None and rstd is not None
        needs = (ctx.requires_grad.input, *ctx.requires_grad.params)
        dx, dweight, dbias = layer_norm_gradients(grad_output, x, weight, mean, rstd, ctx.params[1].dtype, needs)
        return dx, (dweight, dbias)


class RMSNorm(_OfFeatures):
    """y = x * rsqrt(mean(x^2) + eps) * w, [..., features]; w = weight, or 1 + weight when zero_centered.

    cast_before_weight: the product with the weight is of x * rsqrt(..) rounded to x's dtype, as in Hugging Face's Llama.
    Saves x, the weight and rstd.
    """

    eps: float = 1e-5
    zero_centered: bool = False
    cast_before_weight: bool = False

    def parameters(self) -> tuple[Parameter, ...]:
        init = torch.nn.init.zeros_ if self.zero_centered else torch.nn.init.ones_
        return (Parameter("weight", (self.features,), init),)

    def call(self, x: torch.Tensor, params: types.Params) -> types.TeCall:
        return rms_norm, (x.contiguous(), *params, self.eps, self.cast_before_weight, self.zero_centered)

    def op_forward_fake(self, input: TensorProto, params: types.Protos, **_: Any) -> types.Fake:
        output = TensorProto(input.shape, input.dtype, device=input.device)
        return output, [input, params[0], _statistic(input)]

    def op_backward(self, ctx: OperationContext, grad_output: torch.Tensor) -> types.Backward:
        x, weight, rstd = ctx.saved_tensors
        assert x is not None and rstd is not None
        needs = (ctx.requires_grad.input, *ctx.requires_grad.params)
        dx, dweight = rms_norm_gradients(grad_output, x, weight, rstd, self.zero_centered, needs)
        return dx, (dweight,)

    def backward(
        self, ctx: OperationContext, grad_output: torch.Tensor, addend: Optional[torch.Tensor]
    ) -> types.Backward:
        """`op_backward` with an addend of dx's shape."""
        dx, dweights = self.op_backward(ctx, grad_output)
        return dx if dx is None or addend is None else dx.add_(addend), dweights


class L2Normalization(SavesAll):
    """y = x * rsqrt(sum(x^2) + eps) over the last dimension, in fp32, rounded to x's dtype. Saves x and the rsqrt."""

    eps: float = 1e-6

    def op_forward_compute(self, input: torch.Tensor, params: types.Params, **_: Any) -> types.Forward:
        x = input.to(torch.float32)
        inverse = torch.rsqrt(x.square().sum(-1, keepdim=True) + self.eps)
        return (x * inverse).to(input.dtype), [input, inverse]

    def op_forward_fake(self, input: TensorProto, params: types.Protos, **_: Any) -> types.Fake:
        inverse = TensorProto((*input.shape[:-1], 1), torch.float32, device=input.device)
        return TensorProto(input.shape, input.dtype, device=input.device), [input, inverse]

    def op_backward(self, ctx: OperationContext, grad_output: torch.Tensor) -> types.Backward:
        x, inverse = ctx.saved_tensors
        assert x is not None and inverse is not None
        dy, y = grad_output.to(torch.float32), x.to(torch.float32) * inverse
        return (inverse * (dy - y * (dy * y).sum(-1, keepdim=True))).to(x.dtype), ()


def _statistic(x: TensorProto) -> TensorProto:
    """One fp32 number a row of x read as [M, K]."""
    return TensorProto((math.prod(x.shape[:-1]),), torch.float32, device=x.device)
