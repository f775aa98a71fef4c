"""Operations that compute little: Identity, Reshape, ConstantScale."""

from __future__ import annotations

import math
from typing import Any, Optional

import torch

from te_dynamo.errors import InputError
from te_dynamo.operations.context import OperationContext
from te_dynamo.operations.op import BasicOperation, Params, Saved
from te_dynamo.quantized.tensor_proto import TensorProto

__all__ = ["ConstantScale", "Identity", "Reshape", "SavesNothing"]


class SavesNothing(BasicOperation, abstract=True):
    """An operation whose backward reads no tensor."""

    def op_forward_save_ctx(self, ctx: OperationContext, tensors_to_save: Saved) -> None:
        ctx.save_for_backward()


class Identity(SavesNothing):
    """y = x."""

    def op_forward_compute(self, input: torch.Tensor, params: Params, **_: Any) -> tuple[torch.Tensor, Saved]:
        return input, []

    def op_forward_fake(
        self, input: TensorProto, params: tuple[TensorProto, ...], **_: Any
    ) -> tuple[TensorProto, list[Optional[TensorProto]]]:
        return input, []

    def op_backward(self, ctx: OperationContext, grad_output: torch.Tensor) -> tuple[Optional[torch.Tensor], tuple[()]]:
        return grad_output, ()


class Reshape(SavesNothing):
    """x in another shape. shape: one of its sizes may be -1. Backward needs the input's shape only."""

    shape: tuple[int, ...]

    def op_forward_compute(self, input: torch.Tensor, params: Params, **_: Any) -> tuple[torch.Tensor, Saved]:
        return input.reshape(self.shape), []

    def op_forward_fake(
        self, input: TensorProto, params: tuple[TensorProto, ...], **_: Any
    ) -> tuple[TensorProto, list[Optional[TensorProto]]]:
        return TensorProto(self._shape(input.shape), input.dtype, device=input.device), []

    def _shape(self, given: tuple[int, ...]) -> tuple[int, ...]:
        total = math.prod(given)
        known = math.prod(size for size in self.shape if size != -1)
        if self.shape.count(-1) > 1 or (total % known if -1 in self.shape else total != known):
            raise InputError(f"Reshape({self.shape}): an input of shape {list(given)} does not have so many elements")
        return tuple(total // known if size == -1 else size for size in self.shape)

    def op_backward(self, ctx: OperationContext, grad_output: torch.Tensor) -> tuple[Optional[torch.Tensor], tuple[()]]:
        return grad_output.reshape(ctx.input.shape), ()


class ConstantScale(SavesNothing):
    """y = x * scale."""

    scale: float

    def op_forward_compute(self, input: torch.Tensor, params: Params, **_: Any) -> tuple[torch.Tensor, Saved]:
        return input * self.scale, []

    def op_forward_fake(
        self, input: TensorProto, params: tuple[TensorProto, ...], **_: Any
    ) -> tuple[TensorProto, list[Optional[TensorProto]]]:
        return TensorProto(input.shape, input.dtype, device=input.device), []

    def op_backward(self, ctx: OperationContext, grad_output: torch.Tensor) -> tuple[Optional[torch.Tensor], tuple[()]]:
        return grad_output * self.scale, ()
