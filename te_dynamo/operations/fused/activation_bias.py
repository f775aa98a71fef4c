"""Backward: an activation's gradient, the bias gradient and the quantization of dy for the linear before, in one operation.

    before   GELU          dz = dgelu(dy, z)                         writes dz in bf16
             Bias          dbias = sum of dz                         reads dz
             BasicLinear   te.quantize(dz)                           reads dz, twice
                           dx = dz @ weight,  dweight = dz^T @ x
    after    BackwardActivationBias
                           dbias, buffers of dz = te.activation_backward_quantize(dy, z)
                           dx = dz @ weight,  dweight = dz^T @ x

dz is never written in bf16. The Bias may be missing. The activation is one of te.activation's, and the linear wants its dy in FP8 with
one scale for each tensor or block: the kernels write nothing else.
"""

from typing import Optional

from te_dynamo.operations.basic.linear import BasicLinear, Bias
from te_dynamo.operations.fused.joined import JoinedBackward
from te_dynamo.operations.fused.quantized import ACTIVATIONS
from te_dynamo.operations.op import FusedOperation
from te_dynamo.operations.window import Window, fusion_of_windows


class BackwardActivationBias(JoinedBackward):
    """dx [..., K], dweight [N, K] and dbias [N] of y = f(x @ weight^T + bias) from dy [..., N] and z, the input of f."""


@fusion_of_windows((BasicLinear, Bias, ACTIVATIONS), (BasicLinear, ACTIVATIONS))
def fuse_activation_bias(window: Window) -> Optional[FusedOperation]:
    """BasicLinear (, Bias), activation -> BackwardActivationBias where a kernel writes dy as the linear takes it."""
    dy = window[0].grad_output_quantizer()
    return BackwardActivationBias(window) if dy is not None and dy.fused_producers else None
