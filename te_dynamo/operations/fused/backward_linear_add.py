"""Backward: the gradient of an extra output is added in the linear's dgrad. It is the in-place MakeExtraOutput of Transformer Engine.

    before   BasicLinear      dx = dy @ weight         GEMM, writes dx
             MakeExtraOutput  dx' = dx + dextra        reads both, writes dx'
    after    BackwardLinearAdd
                              dx = dy @ weight + dextra      GEMM, dextra in its epilogue

Without a gradient of the extra output, dx is as it is. Recipes other than current scaling add in a pass of its own, as in forward.
"""

from te_dynamo.operations.basic.extra import MakeExtraOutput
from te_dynamo.operations.basic.linear import BasicLinear
from te_dynamo.operations.fused.joined import JoinedBackward
from te_dynamo.operations.op import FusedOperation
from te_dynamo.operations.window import Window, fusion_of_windows


class BackwardLinearAdd(JoinedBackward):
    """dx [..., K] = dy [..., N] @ weight [N, K] + dextra [..., K], and dweight [N, K]."""


@fusion_of_windows((MakeExtraOutput, BasicLinear))
def fuse_backward_linear_add(window: Window) -> FusedOperation:
    """MakeExtraOutput, BasicLinear -> BackwardLinearAdd."""
    return BackwardLinearAdd(window)
