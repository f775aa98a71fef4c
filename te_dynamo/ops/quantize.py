"""`te.quantize`: a tensor into the buffers of its quantizer."""

import torch

from te_dynamo.errors import QuantizationError
from te_dynamo.kernels import quantize as kernels
from te_dynamo.ops.define import te_op
from te_dynamo.ops.fakes import quantized
from te_dynamo.quantizers import Float8CurrentScalingQuantizer, Quantizer

__all__ = ["kernel_arguments", "quantize", "quantize_with_amax"]


def kernel_arguments(quantizer: Quantizer) -> tuple[torch.dtype, bool, bool, bool, float]:
    """(fp8_dtype, rowwise, columnwise, power_of_two, eps): how the kernels take a quantizer's configuration."""
    if not isinstance(quantizer, Float8CurrentScalingQuantizer):
        raise QuantizationError(f"te.quantize: no kernel for {type(quantizer).__name__}")
    q = quantizer
    return q.dtype, q.rowwise, q.columnwise, q.power_of_two_scale, q.amax_epsilon


def _reference(x: torch.Tensor, quantizer: Quantizer) -> list[torch.Tensor]:
    return kernels.quantize_reference(x, *kernel_arguments(quantizer))


def _kernel(x: torch.Tensor, quantizer: Quantizer) -> list[torch.Tensor]:
    return kernels.quantize(x, *kernel_arguments(quantizer))


def quantize_with_amax(x: torch.Tensor, quantizer: Quantizer, amax: torch.Tensor) -> list[torch.Tensor]:
    """The kernel launches of `te.quantize` for a tensor whose amax (fp32 [1]) is known already: one pass over x."""
    return kernels.quantize(x, *kernel_arguments(quantizer), amax)


@te_op(reference=_reference, kernel=_kernel)
def quantize(x: torch.Tensor, quantizer: Quantizer) -> list[torch.Tensor]:
    """x (any rank, read as [M, K], contiguous, bf16, fp16 or fp32) into its quantizer's buffers."""
    return quantized(x, quantizer)
