"""`te.quantize_bias_grad`: the gradient of a linear's output quantized, with the gradient of its bias beside it."""

import torch

from te_dynamo.dialect.define import te_op
from te_dynamo.dialect.fakes import column_sums, quantized
from te_dynamo.dialect.quantize import takes_quantizer
from te_dynamo.kernels.quantize import bias_grad as kernels
from te_dynamo.quantized.quantizers import Quantizer

__all__ = ["quantize_bias_grad"]


@te_op(
    reference=takes_quantizer(kernels.quantize_bias_grad_reference),
    kernel=takes_quantizer(kernels.quantize_bias_grad),
)
def quantize_bias_grad(dy: torch.Tensor, quantizer: Quantizer) -> list[torch.Tensor]:
    """[te.bias_grad(dy), *te.quantize(dy)]: the sums in another order than te.bias_grad's, the buffers the same bits."""
    return [column_sums(dy), *quantized(dy, quantizer)]
