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

from te_dynamo.operations.basic.extra import MakeExtraOutput
from te_dynamo.operations.basic.norm import RMSNorm
from te_dynamo.operations.fused.joined import JoinedBackward
from te_dynamo.operations.op import FusibleOperation
from te_dynamo.operations.window import sliding_window
from te_dynamo.recipe import Recipe


class BackwardAddRMSNorm(JoinedBackward):
    """dx [..., features] of RMSNorm, plus dextra, and dweight [features]."""


def fuse_backward_add_rms_norm(ops: Sequence[FusibleOperation], *, recipe: Optional[Recipe]) -> list[FusibleOperation]:
    """MakeExtraOutput, RMSNorm -> BackwardAddRMSNorm."""
    return sliding_window(ops, (MakeExtraOutput, RMSNorm), BackwardAddRMSNorm)
