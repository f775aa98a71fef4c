"""What every shipped fused operation runs: its basic operations one after another, and two of them in one where a kernel knows both.

    forward    norm or activation, BasicLinear        the first writes the second's quantized input
               BasicLinear (, Bias) (, AddExtraInput)  bias and sum in the GEMM's epilogue
               ConstantScale, AddExtraInput            one pass, rounded once
    backward   BasicLinear (, Bias), activation        the activation's gradient is written quantized, with its sums for the bias
               BasicLinear, ConstantScale              the scale joins that of the quantized dy
               MakeExtraOutput, BasicLinear            the extra gradient in dgrad's epilogue
               MakeExtraOutput, RMSNorm                the extra gradient added in place

A fusion chooses the stretch of operations. What is joined inside of it is decided here alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional

import torch

from te_dynamo.operations import types
from te_dynamo.operations.basic.extra import AddExtraInput, MakeExtraOutput, check_same_shape
from te_dynamo.operations.basic.grouped_linear import GroupedLinear
from te_dynamo.operations.basic.linear import BasicLinear, Bias
from te_dynamo.operations.basic.norm import RMSNorm
from te_dynamo.operations.basic.shape import ConstantScale
from te_dynamo.operations.context import OperationContext, RequiresGrad
from te_dynamo.operations.fused.quantized import (
    activation_gradient_quantized,
    has_gradient_kernel,
    output_quantized,
    unscaled,
)
from te_dynamo.operations.op import BasicOperation, FusedOperation
from te_dynamo.operations.saves import FuserSavesAll
from te_dynamo.quantized.quantize import quantize_tensor
from te_dynamo.quantized.quantizers import Quantizer
from te_dynamo.quantized.tensor_proto import TensorProto


class JoinedForward(FuserSavesAll, FusedOperation, abstract=True):
    """A forward of its basic operations, joined. Saves what they save, of those alone that have a backward to run."""

    def needs_in_forward(self, requires_grad: Sequence[RequiresGrad]) -> Sequence[RequiresGrad]:
        """What the forward of each operation is told of the gradients that are needed."""
        return requires_grad

    def fuser_forward_compute(
        self,
        input: torch.Tensor,
        params: Sequence[types.Params],
        extra_inputs: Sequence[types.Params],
        *,
        requires_grad: Sequence[RequiresGrad],
        **keywords: Any,
    ) -> types.FuserForward:
        needs = self.needs_in_forward(requires_grad)
        output, saved = _forward(self.ops, input, params, extra_inputs, needs, keywords)
        return output, [() for _ in self.ops], _of_those_needed(saved, needs)

    def fuser_forward_fake(
        self, input: TensorProto, params: Any, extra_inputs: Any, *, requires_grad: Any, **keywords: Any
    ) -> types.FuserFake:
        needs = self.needs_in_forward(requires_grad)
        output, extra_outputs, saved = super().fuser_forward_fake(
            input, params, extra_inputs, requires_grad=needs, **keywords
        )
        return output, extra_outputs, _of_those_needed(saved, needs)


class JoinedBackward(FusedOperation, abstract=True):
    """A backward of its basic operations, joined."""

    def fuser_backward(
        self, ctxs: Sequence[OperationContext], grad_output: torch.Tensor, grad_extra_outputs: Sequence[types.Grads]
    ) -> types.FuserBackward:
        return joined_backward(self.ops, ctxs, grad_output, grad_extra_outputs)


def recomputes(second: RequiresGrad) -> bool:
    """Whether backward may compute the input of an MLP's second linear again: wgrad reads it, and what it is made of is kept anyway."""
    return second.input and second.params[0]


def without_wgrad(requires_grad: Sequence[RequiresGrad], index: int) -> list[RequiresGrad]:
    """The same for an operation whose forward is told that no wgrad will read its input."""
    needs = list(requires_grad)
    needs[index] = RequiresGrad(True, (False,), needs[index].extra_inputs)
    return needs


def _of_those_needed(saved: Sequence[Any], needs: Sequence[RequiresGrad]) -> list[Any]:
    return [kept if of.any() else [] for kept, of in zip(saved, needs, strict=True)]


def _is(ops: Sequence[BasicOperation], index: int, *classes: type) -> bool:
    """Whether there is an operation of one of these very classes: a subclass may compute something else."""
    return 0 <= index < len(ops) and type(ops[index]) in classes


def _forward(
    ops: Sequence[Any],
    output: torch.Tensor,
    params: Sequence[types.Params],
    extra_inputs: Sequence[types.Params],
    needs: Sequence[RequiresGrad],
    keywords: dict[str, Any],
) -> tuple[torch.Tensor, list[types.Saved]]:
    """(output, what each operation saves)."""
    saved: list[types.Saved] = [[] for _ in ops]
    buffers: Optional[list[torch.Tensor]] = None  # of what the next linear reads, where no tensor of it was written
    i = 0
    while i < len(ops):
        op, this = ops[i], i
        i += 1
        if _is(ops, this, BasicLinear):
            bias = extra = None
            if _is(ops, i, Bias):
                bias, i = params[i][0], i + 1
            if _is(ops, i, AddExtraInput):
                extra, i = extra_inputs[i][0], i + 1
                check_same_shape((*output.shape[:-1], op.out_features), extra.shape)
            output, saved[this] = op.forward(output, params[this][0], bias, needs[this], extra, buffers)
            buffers = None
        elif _is(ops, this, ConstantScale) and _is(ops, i, AddExtraInput):
            extra, i = extra_inputs[i][0], i + 1
            check_same_shape(output.shape, extra.shape)
            output = torch.add(extra, output, alpha=op.scale).to(output.dtype)
        elif quantized := _output_quantized(ops, this, output, params[this], needs):
            buffers, saved[this] = quantized
        else:
            output, _, (saved[this],) = op.fuser_forward_compute(
                output, params[this:i], extra_inputs[this:i], requires_grad=needs[this:i], **keywords
            )
    return output, saved


def _output_quantized(
    ops: Sequence[Any], index: int, x: torch.Tensor, params: types.Params, needs: Sequence[RequiresGrad]
) -> Optional[tuple[list[torch.Tensor], types.Saved]]:
    """(buffers of an operation's output, what it saves), where the linear behind it reads them and one kernel writes them."""
    if not _is(ops, index + 1, BasicLinear):
        return None
    config = ops[index + 1].config(needs[index + 1])
    if config is None or config.grad_output_quantizer is None or config.wgrad_in_high_precision:
        return None
    return output_quantized(ops[index], x, params, config.input_quantizer)


def joined_backward(
    ops: Sequence[Any],
    ctxs: Sequence[OperationContext],
    grad_output: torch.Tensor,
    grad_extra_outputs: Sequence[types.Grads],
) -> types.FuserBackward:
    """What `fuser_backward` of the operations gives; those before the last that needs a gradient are left out."""
    grad: Any = grad_output
    params: list[types.Grads] = [(None,) * len(ctx.params) for ctx in ctxs]
    extra_inputs: list[types.Grads] = [(None,) * len(ctx.extra_inputs) for ctx in ctxs]
    i = len(ops)
    while i:
        i -= 1
        op, ctx, this = ops[i], ctxs[i], i
        if not ctx.requires_grad.any():
            return None, params, extra_inputs
        if quantizer := _dy_quantizer(ops, ctxs, this):
            i = _linear_before(ops, this)
            needs_sums = this - i == 2 and ctxs[i + 1].requires_grad.params[0]
            if type(op) is ConstantScale:
                *data, scale_inv = quantize_tensor(grad.contiguous(), quantizer)
                sums, buffers = None, [*data, scale_inv * op.scale]
            else:
                h, *scales = ctx.saved_tensors
                assert h is not None
                if scales:
                    extra_inputs[this] = (op.scales_gradient(ctx, grad),)
                    grad = op.activation_gradient(grad, scales[0])
                sums, buffers = activation_gradient_quantized(unscaled(op), grad, h, quantizer, needs_sums)
            grad, params[i] = ops[i].products(ctxs[i], buffers)
            if sums is not None:
                params[i + 1] = (sums.to(ctxs[i + 1].params[0].dtype),)
        elif _is(ops, i, BasicLinear, RMSNorm) and _is(ops, i - 1, MakeExtraOutput):
            i -= 1
            grad, params[this] = op.backward(ctx, grad, *grad_extra_outputs[i])
        else:
            one = slice(i, i + 1)
            grad, params[one], extra_inputs[one] = op.fuser_backward(ctxs[one], grad, grad_extra_outputs[one])
    return grad, params, extra_inputs


def _linear_before(ops: Sequence[Any], index: int) -> int:
    """Where the linear is whose output, with a bias or without, an operation reads."""
    return index - 2 if _is(ops, index - 1, Bias) else index - 1


def _dy_quantizer(ops: Sequence[Any], ctxs: Sequence[OperationContext], index: int) -> Optional[Quantizer]:
    """How the linear before a scale or an activation holds its dy, where what that gives need not be written unquantized."""
    linear = _linear_before(ops, index)
    if not _is(ops, linear, BasicLinear, GroupedLinear):
        return None
    needs = ctxs[linear].requires_grad
    config = ops[linear].config(needs)
    if config is None or config.grad_output_quantizer is None or config.wgrad_in_high_precision or not needs.any():
        return None
    quantizer: Quantizer = config.grad_output_quantizer.with_usage(needs.input, needs.params[0])
    if type(ops[index]) is ConstantScale:
        return quantizer if quantizer.one_scale and linear == index - 1 else None
    if not quantizer.one_scale and _is(ops, linear, GroupedLinear):
        return None  # blocks of columns begin with the groups
    return quantizer if has_gradient_kernel(unscaled(ops[index]), quantizer) else None
