"""Forward: scale and sum in one pass over the linear's output.

    before   BasicLinear    h = x @ weight^T         GEMM, writes h
             ConstantScale  z = h * scale            reads h, writes z
             AddExtraInput  y = z + extra            reads z and extra, writes y
    after    ForwardLinearScaleAdd
                            h = x @ weight^T         GEMM
                            y = extra + scale * h    reads h and extra, writes y

The sum is rounded once. Without the fusion, z is rounded before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Optional

from te_dynamo.operations.basic.extra import AddExtraInput
from te_dynamo.operations.basic.linear import BasicLinear
from te_dynamo.operations.basic.shape import ConstantScale
from te_dynamo.operations.fused.joined import JoinedForward
from te_dynamo.operations.op import FusibleOperation
from te_dynamo.operations.window import sliding_window
from te_dynamo.recipe import Recipe


class ForwardLinearScaleAdd(JoinedForward):
    """y [..., N] = scale * (x [..., K] @ weight [N, K]^T) + extra [..., N]."""


def fuse_linear_scale_add(ops: Sequence[FusibleOperation], *, recipe: Optional[Recipe]) -> list[FusibleOperation]:
    """BasicLinear, ConstantScale, AddExtraInput -> ForwardLinearScaleAdd."""
    return sliding_window(ops, (BasicLinear, ConstantScale, AddExtraInput), ForwardLinearScaleAdd)
