"""Backward: the gradient of an extra output is added in the linear's dgrad. It is the in-place MakeExtraOutput of Transformer Engine.

    before   BasicLinear      dx = dy @ weight         GEMM, writes dx
             MakeExtraOutput  dx' = dx + dextra        reads both, writes dx'
    after    BackwardLinearAdd
                              dx = dy @ weight + dextra      GEMM, dextra in its epilogue

Without a gradient of the extra output, dx is as it is. Recipes other than current scaling add in a pass of its own, as in forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Optional

import torch

from te_dynamo.operations import types
from te_dynamo.operations.basic.extra import MakeExtraOutput
from te_dynamo.operations.basic.linear import BasicLinear
from te_dynamo.operations.context import OperationContext
from te_dynamo.operations.op import FusedOperation, FusibleOperation
from te_dynamo.operations.window import sliding_window
from te_dynamo.recipe import Recipe


class BackwardLinearAdd(FusedOperation):
    """dx [..., K] = dy [..., N] @ weight [N, K] + dextra [..., K], and dweight [N, K]."""

    def fuser_backward(
        self, ctxs: Sequence[OperationContext], grad_output: torch.Tensor, grad_extra_outputs: Sequence[types.Grads]
    ) -> types.FuserBackward:
        linear = self.ops[1]
        assert isinstance(linear, BasicLinear)
        (grad_extra,) = grad_extra_outputs[0]
        dx, of_params = linear.backward(ctxs[1], grad_output, grad_extra)
        return dx, [(), of_params], [(), ()]


def fuse_backward_linear_add(ops: Sequence[FusibleOperation], *, recipe: Optional[Recipe]) -> list[FusibleOperation]:
    """MakeExtraOutput, BasicLinear -> BackwardLinearAdd."""
    return sliding_window(ops, (MakeExtraOutput, BasicLinear), BackwardLinearAdd)
