"""Backward: the gradient of a residual branch is added into an RMSNorm's own dx.

    before   RMSNorm          dx = ...                 writes dx
             MakeExtraOutput  dx' = dx + dextra        reads both, writes dx'
    after    BackwardAddRMSNorm
                              dx = ...;  dx += dextra  no second tensor

The norms' backward is made of aten operations. When compiled, all of it is one kernel.
"""

from te_dynamo.operations.basic.extra import MakeExtraOutput
from te_dynamo.operations.basic.norm import RMSNorm
from te_dynamo.operations.fused.joined import JoinedBackward
from te_dynamo.operations.op import FusedOperation
from te_dynamo.operations.window import Window, fusion_of_windows


class BackwardAddRMSNorm(JoinedBackward):
    """dx [..., features] of RMSNorm, plus dextra, and dweight [features]."""


@fusion_of_windows((MakeExtraOutput, RMSNorm))
def fuse_backward_add_rms_norm(window: Window) -> FusedOperation:
    """MakeExtraOutput, RMSNorm -> BackwardAddRMSNorm."""
    return BackwardAddRMSNorm(window)
