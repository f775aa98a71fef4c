"""Forward: an extra input is added in the linear's GEMM. It is the in-place AddExtraInput of Transformer Engine.

    before   BasicLinear    h = x @ weight^T         GEMM, writes h
             Bias           z = h + bias             reads h, writes z
             AddExtraInput  y = z + extra            reads z and extra, writes y
    after    ForwardLinearBiasAdd
                            y = x @ weight^T + bias + extra      GEMM, bias and extra in its epilogue

The Bias may be missing. y is a tensor of its own: the user's extra input keeps its values. In other recipes than current scaling the
GEMM has no such epilogue, and the sum is a pass of its own over its result.
"""

from te_dynamo.operations.basic.extra import AddExtraInput
from te_dynamo.operations.basic.linear import BasicLinear, Bias
from te_dynamo.operations.fused.joined import JoinedForward
from te_dynamo.operations.op import FusedOperation
from te_dynamo.operations.window import Window, fusion_of_windows


class ForwardLinearBiasAdd(JoinedForward):
    """y [..., N] = x [..., K] @ weight [N, K]^T + bias [N] + extra [..., N], rounded to x's dtype before extra is added."""


@fusion_of_windows((BasicLinear, Bias, AddExtraInput), (BasicLinear, AddExtraInput))
def fuse_linear_bias_add(window: Window) -> FusedOperation:
    """BasicLinear (, Bias), AddExtraInput -> ForwardLinearBiasAdd."""
    return ForwardLinearBiasAdd(window)
