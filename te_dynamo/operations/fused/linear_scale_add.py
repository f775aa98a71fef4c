"""Forward: scale and sum in one pass over the linear's output.

    before   BasicLinear    h = x @ weight^T         GEMM, writes h
             ConstantScale  z = h * scale            reads h, writes z
             AddExtraInput  y = z + extra            reads z and extra, writes y
    after    ForwardLinearScaleAdd
                            h = x @ weight^T         GEMM
                            y = extra + scale * h    reads h and extra, writes y

The sum is rounded once. Without the fusion, z is rounded before it.
"""

from te_dynamo.operations.basic.extra import AddExtraInput
from te_dynamo.operations.basic.linear import BasicLinear
from te_dynamo.operations.basic.shape import ConstantScale
from te_dynamo.operations.fused.joined import JoinedForward
from te_dynamo.operations.op import FusedOperation
from te_dynamo.operations.window import Window, fusion_of_windows


class ForwardLinearScaleAdd(JoinedForward):
    """y [..., N] = scale * (x [..., K] @ weight [N, K]^T) + extra [..., N]."""


@fusion_of_windows((BasicLinear, ConstantScale, AddExtraInput))
def fuse_linear_scale_add(window: Window) -> FusedOperation:
    """BasicLinear, ConstantScale, AddExtraInput -> ForwardLinearScaleAdd."""
    return ForwardLinearScaleAdd(window)
