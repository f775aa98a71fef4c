"""Where a list of operations takes a second tensor, or gives one: residual connections and branches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional

import torch

from te_dynamo.errors import InputError
from te_dynamo.operations.context import OperationContext
from te_dynamo.operations.op import BasicOperation, Params, Saved
from te_dynamo.quantized.tensor_proto import TensorProto

__all__ = ["AddExtraInput", "MakeExtraOutput", "check_same_shape"]

_Grads = tuple[Optional[torch.Tensor], ...]


class AddExtraInput(BasicOperation):
    """y = x + extra, of one shape, rounded to x's dtype. dy flows to both. Saves nothing."""

    num_extra_inputs = 1

    def fuser_forward_compute(
        self, input: torch.Tensor, params: Sequence[Params], extra_inputs: Sequence[Params], **_: Any
    ) -> tuple[torch.Tensor, list[Params], list[Saved]]:
        ((extra,),) = extra_inputs
        check_same_shape(input.shape, extra.shape)
        return (input + extra).to(input.dtype), [()], [[]]

    def fuser_forward_save_ctx(self, ctxs: Sequence[OperationContext], tensors_to_save: Sequence[Saved]) -> None:
        ctxs[0].save_for_backward()

    def fuser_forward_fake(
        self,
        input: TensorProto,
        params: Sequence[tuple[TensorProto, ...]],
        extra_inputs: Sequence[tuple[TensorProto, ...]],
        **_: Any,
    ) -> tuple[TensorProto, list[tuple[TensorProto, ...]], list[list[Optional[TensorProto]]]]:
        check_same_shape(input.shape, extra_inputs[0][0].shape)
        return TensorProto(input.shape, input.dtype, device=input.device), [()], [[]]

    def fuser_backward(
        self, ctxs: Sequence[OperationContext], grad_output: torch.Tensor, grad_extra_outputs: Sequence[_Grads]
    ) -> tuple[Optional[torch.Tensor], list[_Grads], list[_Grads]]:
        (ctx,) = ctxs
        grad_extra = grad_output.to(ctx.extra_inputs[0].dtype) if ctx.requires_grad.extra_inputs[0] else None
        return grad_output, [()], [(grad_extra,)]


class MakeExtraOutput(BasicOperation):
    """y = x, and x again as an extra output. dx = dy + d(extra), where a missing d(extra) is zero. Saves nothing."""

    num_extra_outputs = 1

    def fuser_forward_compute(
        self, input: torch.Tensor, params: Sequence[Params], extra_inputs: Sequence[Params], **_: Any
    ) -> tuple[torch.Tensor, list[Params], list[Saved]]:
        return input, [(input,)], [[]]

    def fuser_forward_save_ctx(self, ctxs: Sequence[OperationContext], tensors_to_save: Sequence[Saved]) -> None:
        ctxs[0].save_for_backward()

    def fuser_forward_fake(
        self,
        input: TensorProto,
        params: Sequence[tuple[TensorProto, ...]],
        extra_inputs: Sequence[tuple[TensorProto, ...]],
        **_: Any,
    ) -> tuple[TensorProto, list[tuple[TensorProto, ...]], list[list[Optional[TensorProto]]]]:
        return input, [(input,)], [[]]

    def fuser_backward(
        self, ctxs: Sequence[OperationContext], grad_output: torch.Tensor, grad_extra_outputs: Sequence[_Grads]
    ) -> tuple[Optional[torch.Tensor], list[_Grads], list[_Grads]]:
        ((grad_extra,),) = grad_extra_outputs
        return grad_output if grad_extra is None else grad_output + grad_extra, [()], [()]


def check_same_shape(input: tuple[int, ...], extra: tuple[int, ...]) -> None:
    """Raises InputError unless an extra input has the shape of what it is added to."""
    if tuple(input) != tuple(extra):
        raise InputError(f"AddExtraInput: the extra input has the shape {list(extra)}, the input {list(input)}")
