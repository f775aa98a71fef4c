"""Joint: the MLPs of a mixture's experts, which compute the second linear's input again in backward instead of saving it.

    before   GroupedLinear  h = x @ w1[g]^T                         saves x by columns, w1 by columns
             ScaledSwiGLU   a = swiglu(h) * scales                  saves h and scales
             GroupedLinear  y = a @ w2[g]^T                         saves a by columns, w2 by columns
    after    GroupedMLP     the same forward, a quantized by rows alone; saved is all but a

    backward                a = swiglu(h) * scales, quantized by columns; then that of the three, with the gradient of h
                            = te.gated_backward_quantize_halves(da * scales, h's halves)

Backward of the activation reads h anyway. Of the memory that h and a take together, a gated activation's a is a third in bf16 and a fifth in
FP8. One pass over h saves it. The results are those of the basic operations, bit for bit. The activation is any that has one input, gated or
not, or one times a scale for each row. The recipe is any, high precision included. Each linear has groups of its own among the extra inputs.
Where nothing before a needs a gradient, a is saved, because h is not kept there.

Under the compiler the operation is one node until lowering. Of its parts, a partitioner would compute a's columns in forward and save them,
because nothing in them depends on dy. Fusions of graphs do not see inside.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional

import torch

from te_dynamo.dialect.grouped import quantize_groups
from te_dynamo.dialect.grouped_linear import grouped_backward_products, grouped_grad_output_quantizer
from te_dynamo.operations import types
from te_dynamo.operations.basic.activation import Activation
from te_dynamo.operations.basic.gated import Gated
from te_dynamo.operations.basic.grouped_linear import GroupedLinear
from te_dynamo.operations.basic.scaled import Scaled
from te_dynamo.operations.context import OperationContext, RequiresGrad
from te_dynamo.operations.fused.backward_chain import backward_chain
from te_dynamo.operations.fused.quantized import DIALECT_GATED, activation_gradient_quantized
from te_dynamo.operations.op import FusedOperation, FusibleOperation
from te_dynamo.operations.saves import FuserSavesAll
from te_dynamo.operations.window import sliding_window
from te_dynamo.quantized.tensor_proto import TensorProto
from te_dynamo.recipe import Recipe


class GroupedMLP(FuserSavesAll, FusedOperation):
    """y[m, N] = f(x[m, K] @ w1[g]^T) @ w2[g]^T for the rows m of group g, f an activation, by the scales of its rows or not."""

    # One node of the graph: a partitioner that sees the parts computes in forward all that needs no dy, and saves it.
    opaque = True

    def fuser_forward_compute(
        self,
        input: torch.Tensor,
        params: Sequence[types.Params],
        extra_inputs: Sequence[types.Params],
        *,
        requires_grad: Sequence[RequiresGrad],
        **keywords: Any,
    ) -> types.FuserForward:
        saved: list[types.Saved] = []
        needs = _needs_in_forward(requires_grad)
        for i, op in enumerate(self.ops):
            one = slice(i, i + 1)
            input, _, to_save = op.fuser_forward_compute(
                input, params[one], extra_inputs[one], requires_grad=needs[one], **keywords
            )
            saved += to_save if needs[i].any() else [[]]
        return input, [() for _ in self.ops], saved

    def fuser_forward_fake(
        self, input: TensorProto, params: Any, extra_inputs: Any, *, requires_grad: Any, **keywords: Any
    ) -> types.FuserFake:
        needs = _needs_in_forward(requires_grad)
        output, extra_outputs, saved = super().fuser_forward_fake(
            input, params, extra_inputs, requires_grad=needs, **keywords
        )
        return output, extra_outputs, [kept if of.any() else [] for kept, of in zip(saved, needs, strict=True)]

    def fuser_backward(
        self, ctxs: Sequence[OperationContext], grad_output: torch.Tensor, grad_extra_outputs: Any
    ) -> types.FuserBackward:
        first, activation, second = ctxs
        if _recomputes([ctx.requires_grad for ctx in ctxs]):
            offs, *weight = second.saved_tensors
            second = second.with_saved([offs, *self._second_input(activation, second.requires_grad, offs), *weight])
        da, *grads = backward_chain(self.ops[2:], [second], grad_output, grad_extra_outputs[2:])
        dx, *grads_before = self._first_backward([first, activation], da, grad_extra_outputs[:2])
        params, extra_inputs = (before + after for before, after in zip(grads_before, grads, strict=True))
        return dx, params, extra_inputs

    def _first_backward(
        self, ctxs: Sequence[OperationContext], da: Any, grad_extra_outputs: Any
    ) -> types.FuserBackward:
        """What `backward_chain` gives of the first linear and the activation, a gated one's gradient quantized in one kernel."""
        linear, activation, _ = self.ops
        gated = activation.activation() if isinstance(activation, Scaled) else activation
        assert isinstance(linear, GroupedLinear)
        config = linear.config(ctxs[0].requires_grad)
        fuses = config is not None and config.input_quantizer.fused_producers
        if type(gated) not in DIALECT_GATED or not ctxs[0].requires_grad.any() or not fuses:
            return backward_chain(self.ops[:2], ctxs, da, grad_extra_outputs)
        h, *scales = ctxs[1].saved_tensors
        extra: tuple[Optional[torch.Tensor], ...] = ()
        if isinstance(activation, Scaled):
            assert scales[0] is not None
            extra = (activation.scales_gradient(ctxs[1], da),)
            da = activation.activation_gradient(da, scales[0])
        assert h is not None
        args = linear.backward_args(ctxs[0])
        _, buffers = activation_gradient_quantized(gated, da, h, grouped_grad_output_quantizer(args), False)
        dx, dweight = grouped_backward_products(args, buffers)
        return dx, [(dweight,), ()], [(None,), extra]

    def _second_input(
        self, ctx: OperationContext, requires_grad: RequiresGrad, offs: Optional[torch.Tensor]
    ) -> list[torch.Tensor]:
        """What the second linear's own forward saves of its input. ctx: the activation's; offs: the second linear's."""
        _, activation, linear = self.ops
        assert isinstance(linear, GroupedLinear)
        h, *scales = ctx.saved_tensors
        assert h is not None
        a, _, _ = activation.fuser_forward_compute(
            h,
            [()],
            [tuple(s for s in scales if s is not None)],
            requires_grad=(ctx.requires_grad,),
            training=ctx.training,
        )
        config = linear.config(requires_grad)
        if config is None:
            return [a]
        quantizer = config.input_quantizer.with_usage(rowwise=False, columnwise=True)
        assert offs is not None
        return [*quantizer.operand(quantize_groups(a.contiguous(), offs, quantizer), columnwise=True)]


def _recomputes(requires_grad: Sequence[RequiresGrad]) -> bool:
    """Whether the second linear's input is computed again: where wgrad reads it, and the activation's input is kept anyway."""
    return requires_grad[2].input and requires_grad[2].params[0]


def _needs_in_forward(requires_grad: Sequence[RequiresGrad]) -> tuple[RequiresGrad, ...]:
    """What the forward of each operation is told: of the second linear's, that no wgrad will read the input that it has."""
    first, activation, second = requires_grad
    return first, activation, RequiresGrad(True, (False,), (False,)) if _recomputes(requires_grad) else second


def fuse_grouped_mlp(ops: Sequence[FusibleOperation], *, recipe: Optional[Recipe]) -> list[FusibleOperation]:
    """GroupedLinear, activation, GroupedLinear -> GroupedMLP, which does not save the second linear's input."""
    return sliding_window(ops, (GroupedLinear, (Activation, Gated, Scaled), GroupedLinear), GroupedMLP)
