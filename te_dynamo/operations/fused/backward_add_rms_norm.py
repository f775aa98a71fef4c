"""Backward: the gradient of a residual branch is added into an RMSNorm's own dx.

    before   RMSNorm          dx = ...                 writes dx
             MakeExtraOutput  dx' = dx + dextra        reads both, writes dx'
    after    BackwardAddRMSNorm
                              dx = ...;  dx += dextra  no second tensor

The norms' backward is made of aten operations. When compiled, all of it is one kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Optional

import torch

from te_dynamo.operations import types
from te_dynamo.operations.basic.extra import MakeExtraOutput
from te_dynamo.operations.basic.norm import RMSNorm
from te_dynamo.operations.context import OperationContext
from te_dynamo.operations.op import FusedOperation, FusibleOperation
from te_dynamo.operations.window import sliding_window
from te_dynamo.recipe import Recipe


class BackwardAddRMSNorm(FusedOperation):
    """dx [..., features] of RMSNorm, plus dextra, and dweight [features]."""

    def fuser_backward(
        self, ctxs: Sequence[OperationContext], grad_output: torch.Tensor, grad_extra_outputs: Sequence[types.Grads]
    ) -> types.FuserBackward:
        (grad_extra,) = grad_extra_outputs[0]
        dx, of_params = self.ops[1].op_backward(ctxs[1], grad_output)
        if dx is not None and grad_extra is not None:
            dx = dx.add_(grad_extra)
        return dx, [(), of_params], [(), ()]


def fuse_backward_add_rms_norm(ops: Sequence[FusibleOperation], *, recipe: Optional[Recipe]) -> list[FusibleOperation]:
    """MakeExtraOutput, RMSNorm -> BackwardAddRMSNorm."""
    return sliding_window(ops, (MakeExtraOutput, RMSNorm), BackwardAddRMSNorm)
