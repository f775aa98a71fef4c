"""Joint: a norm writes the quantized input of the linear that follows it.

    before   RMSNorm      y, rstd = te.rms_norm(x)             writes y in bf16
             BasicLinear  te.quantize(y)                       reads y, twice
                          z = y @ weight^T
             Bias         z + bias
    after    LayerNormLinear
                          rstd, buffers of y = te.rms_norm_quantize(x)
                          z = y @ weight^T + bias              the bias in the GEMM's epilogue

Backward is that of the basic operations. The fusion is joint because it saves what its own backward reads and no more: x, the norm's weight and
its statistics, only where the norm has a gradient to compute. The norm is a LayerNorm or an RMSNorm. The Bias may be missing. The recipe is
one whose buffers the norm kernels write (one scale for each tensor or block) and whose backward is quantized.
"""

from typing import Optional

from te_dynamo.operations.basic.linear import BasicLinear, Bias
from te_dynamo.operations.fused.joined import JoinedBackward, JoinedForward
from te_dynamo.operations.fused.quantized import NORMS
from te_dynamo.operations.op import FusedOperation
from te_dynamo.operations.window import Window, fusion_of_windows


class LayerNormLinear(JoinedForward, JoinedBackward):
    """z [..., N] = norm(x [..., K]) @ weight [N, K]^T (+ bias [N])."""


@fusion_of_windows((NORMS, BasicLinear, Bias), (NORMS, BasicLinear))
def fuse_layer_norm_linear(window: Window) -> Optional[FusedOperation]:
    """LayerNorm or RMSNorm, BasicLinear (, Bias) -> LayerNormLinear."""
    linear = window[1]
    quantized = linear.grad_output_quantizer() is not None and linear.input_quantizer().fused_producers
    return LayerNormLinear(window) if quantized else None
