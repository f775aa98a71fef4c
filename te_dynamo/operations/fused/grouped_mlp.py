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

from te_dynamo.dialect.grouped_linear import quantize_groups
from te_dynamo.operations import types
from te_dynamo.operations.basic.activation import Activation
from te_dynamo.operations.basic.gated import Gated
from te_dynamo.operations.basic.grouped_linear import GroupedLinear
from te_dynamo.operations.basic.scaled import Scaled
from te_dynamo.operations.context import OperationContext, RequiresGrad
from te_dynamo.operations.fused.joined import JoinedBackward, JoinedForward, recomputes, without_wgrad
from te_dynamo.operations.op import FusedOperation
from te_dynamo.operations.window import Window, fusion_of_windows


class GroupedMLP(JoinedForward, JoinedBackward):
    """y[m, N] = f(x[m, K] @ w1[g]^T) @ w2[g]^T for the rows m of group g, f an activation, by the scales of its rows or not."""

    # One node of the graph: a partitioner that sees the parts computes in forward all that needs no dy, and saves it.
    opaque = True

    def needs_in_forward(self, requires_grad: Sequence[RequiresGrad]) -> Sequence[RequiresGrad]:
        return without_wgrad(requires_grad, 2) if recomputes(requires_grad[2]) else requires_grad

    def fuser_backward(
        self, ctxs: Sequence[OperationContext], grad_output: torch.Tensor, grad_extra_outputs: Any
    ) -> types.FuserBackward:
        first, activation, second = ctxs
        if recomputes(second.requires_grad):
            offs, *weight = second.saved_tensors
            second = second.with_saved([offs, *self._second_input(activation, second.requires_grad, offs), *weight])
        return super().fuser_backward([first, activation, second], grad_output, grad_extra_outputs)

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


@fusion_of_windows((GroupedLinear, (Activation, Gated, Scaled), GroupedLinear))
def fuse_grouped_mlp(window: Window) -> FusedOperation:
    """GroupedLinear, activation, GroupedLinear -> GroupedMLP, which does not save the second linear's input."""
    return GroupedMLP(window)
