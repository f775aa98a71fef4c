"""Where a list of operations takes a second tensor, or gives one: residual connections and branches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from te_dynamo.errors import InputError
from te_dynamo.operations import types
from te_dynamo.operations.context import OperationContext
from te_dynamo.operations.op import BasicOperation
from te_dynamo.operations.saves import FuserSavesAll
from te_dynamo.quantized.tensor_proto import TensorProto


class AddExtraInput(FuserSavesAll, BasicOperation):
    """y = x + extra, of one shape, rounded to x's dtype. dy flows to both. Saves nothing."""

    num_extra_inputs = 1

    def fuser_forward_compute(
        self, input: torch.Tensor, params: Sequence[types.Params], extra_inputs: Sequence[types.Params], **_: Any
    ) -> types.FuserForward:
        ((extra,),) = extra_inputs
        check_same_shape(input.shape, extra.shape)
        return (input + extra).to(input.dtype), [()], [[]]

    def fuser_forward_fake(
        self, input: TensorProto, params: Sequence[types.Protos], extra_inputs: Sequence[types.Protos], **_: Any
    ) -> types.FuserFake:
        check_same_shape(input.shape, extra_inputs[0][0].shape)
        return TensorProto(input.shape, input.dtype, device=input.device), [()], [[]]

    def fuser_backward(
        self, ctxs: Sequence[OperationContext], grad_output: torch.Tensor, grad_extra_outputs: Sequence[types.Grads]
    ) -> types.FuserBackward:
        (ctx,) = ctxs
        grad_extra = grad_output.to(ctx.extra_inputs[0].dtype) if ctx.requires_grad.extra_inputs[0] else None
        return grad_output, [()], [(grad_extra,)]


class MakeExtraOutput(FuserSavesAll, BasicOperation):
    """y = x, and x again as an extra output. dx = dy + d(extra), where a missing d(extra) is zero. Saves nothing."""

    num_extra_outputs = 1

    def fuser_forward_compute(
        self, input: torch.Tensor, params: Sequence[types.Params], extra_inputs: Sequence[types.Params], **_: Any
    ) -> types.FuserForward:
        return input, [(input,)], [[]]

    def fuser_forward_fake(
        self, input: TensorProto, params: Sequence[types.Protos], extra_inputs: Sequence[types.Protos], **_: Any
    ) -> types.FuserFake:
        return input, [(input,)], [[]]

    def fuser_backward(
        self, ctxs: Sequence[OperationContext], grad_output: torch.Tensor, grad_extra_outputs: Sequence[types.Grads]
    ) -> types.FuserBackward:
        ((grad_extra,),) = grad_extra_outputs
        return grad_output if grad_extra is None else grad_output + grad_extra, [()], [()]


def check_same_shape(input: tuple[int, ...], extra: tuple[int, ...]) -> None:
    """Raises InputError unless an extra input has the shape of what it is added to."""
    if tuple(input) != tuple(extra):
        raise InputError(f"AddExtraInput: the extra input has the shape {list(extra)}, the input {list(input)}")
