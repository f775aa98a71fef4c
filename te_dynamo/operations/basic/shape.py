"""Operations that compute little: Identity, Reshape, ConstantScale."""

from __future__ import annotations

import math
from typing import Any

import torch

from te_dynamo.errors import InputError
from te_dynamo.operations import types
from te_dynamo.operations.context import OperationContext
from te_dynamo.operations.saves import SavesAll
from te_dynamo.quantized.tensor_proto import TensorProto


class Identity(SavesAll):
    """y = x."""

    def op_forward_compute(self, input: torch.Tensor, params: types.Params, **_: Any) -> types.Forward:
        return input, []

    def op_forward_fake(self, input: TensorProto, params: types.Protos, **_: Any) -> types.Fake:
        return input, []

    def op_backward(self, ctx: OperationContext, grad_output: torch.Tensor) -> types.Backward:
        return grad_output, ()


class Reshape(SavesAll):
    """x in another shape. shape: one of its sizes may be -1. Backward needs the input's shape only."""

    shape: tuple[int, ...]

    def op_forward_compute(self, input: torch.Tensor, params: types.Params, **_: Any) -> types.Forward:
        return input.reshape(self.shape), []

    def op_forward_fake(self, input: TensorProto, params: types.Protos, **_: Any) -> types.Fake:
        return TensorProto(self._shape(input.shape), input.dtype, device=input.device), []

    def _shape(self, given: tuple[int, ...]) -> tuple[int, ...]:
        total = math.prod(given)
        known = math.prod(size for size in self.shape if size != -1)
        if self.shape.count(-1) > 1 or (total % known if -1 in self.shape else total != known):
            raise InputError(f"Reshape({self.shape}): an input of shape {list(given)} does not have so many elements")
        return tuple(total // known if size == -1 else size for size in self.shape)

    def op_backward(self, ctx: OperationContext, grad_output: torch.Tensor) -> types.Backward:
        return grad_output.reshape(ctx.input.shape), ()


class ConstantScale(SavesAll):
    """y = x * scale."""

    scale: float

    def op_forward_compute(self, input: torch.Tensor, params: types.Params, **_: Any) -> types.Forward:
        return input * self.scale, []

    def op_forward_fake(self, input: TensorProto, params: types.Protos, **_: Any) -> types.Fake:
        return TensorProto(input.shape, input.dtype, device=input.device), []

    def op_backward(self, ctx: OperationContext, grad_output: torch.Tensor) -> types.Backward:
        return grad_output * self.scale, ()
