"""Forward: a bias, and the activation after it, join the linear.

    before   BasicLinear   h = x @ weight^T            GEMM, writes h
             Bias          z = h + bias                reads h, writes z
             GELU          y = gelu(z)
    after    ForwardLinearBiasActivation
                           z = x @ weight^T + bias     GEMM, the bias in its epilogue, one rounding
                           y = gelu(z)

z is what the activation's backward reads, so it is written in any case; h is not. The activation may be missing, and may be any
that has one input and no extra ones.
"""

from te_dynamo.operations.basic.activation import Activation
from te_dynamo.operations.basic.linear import BasicLinear, Bias
from te_dynamo.operations.fused.joined import JoinedForward
from te_dynamo.operations.op import FusedOperation
from te_dynamo.operations.window import Window, fusion_of_windows


class ForwardLinearBiasActivation(JoinedForward):
    """y [..., N] = f(x [..., K] @ weight [N, K]^T + bias [N]); f the identity without a third operation."""


@fusion_of_windows((BasicLinear, Bias, Activation), (BasicLinear, Bias))
def fuse_linear_bias_activation(window: Window) -> FusedOperation:
    """BasicLinear, Bias (, activation) -> ForwardLinearBiasActivation, the longer first."""
    return ForwardLinearBiasActivation(window)
