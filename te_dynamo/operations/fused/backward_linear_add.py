"""Backward: the gradient of an extra output is added in the linear's dgrad. It is the in-place MakeExtraOutput of Transformer Engine.

    before   BasicLinear      dx = dy @ weight         GEMM, writes dx
             MakeExtraOutput  dx' = dx + dextra        reads both, writes dx'
    after    BackwardLinearAdd
                              dx = dy @ weight + dextra      GEMM (te.gemm_add), dextra in its epilogue

Without a gradient of the extra output, dx is as it is. Recipes other than current scaling add in a pass of its own, as in forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Optional

from te_dynamo.operations.basic.extra import MakeExtraOutput
from te_dynamo.operations.basic.linear import BasicLinear
from te_dynamo.operations.fused.joined import JoinedBackward
from te_dynamo.operations.op import FusibleOperation
from te_dynamo.operations.window import sliding_window
from te_dynamo.recipe import Recipe


class BackwardLinearAdd(JoinedBackward):
    """dx [..., K] = dy [..., N] @ weight [N, K] + dextra [..., K], and dweight [N, K]."""


def fuse_backward_linear_add(ops: Sequence[FusibleOperation], *, recipe: Optional[Recipe]) -> list[FusibleOperation]:
    """MakeExtraOutput, BasicLinear -> BackwardLinearAdd."""
    return sliding_window(ops, (MakeExtraOutput, BasicLinear), BackwardLinearAdd)
