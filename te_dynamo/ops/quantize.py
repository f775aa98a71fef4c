"""`te.quantize`: a tensor into the buffers of its quantizer."""

import functools
from collections.abc import Callable
from itertools import chain
from typing import Any

import torch

from te_dynamo.errors import QuantizationError
from te_dynamo.kernels import quantize as kernels
from te_dynamo.ops.define import te_op
from te_dynamo.ops.fakes import quantized
from te_dynamo.quantizers import Float8CurrentScalingQuantizer, Quantizer

__all__ = ["kernel_arguments", "quantize", "quantize_with_amax", "takes_quantizer"]


def kernel_arguments(quantizer: Quantizer) -> tuple[torch.dtype, bool, bool, bool, float]:
    """(fp8_dtype, rowwise, columnwise, power_of_two, eps): how the kernels take a quantizer's configuration."""
    if not isinstance(quantizer, Float8CurrentScalingQuantizer):
        raise QuantizationError(f"te.quantize: no kernel for {type(quantizer).__name__}")
    q = quantizer
    return q.dtype, q.rowwise, q.columnwise, q.power_of_two_scale, q.amax_epsilon


def takes_quantizer(implementation: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel's launcher or reference as an operation calls it: its `kernel_arguments` in the quantizer's place."""

    @functools.wraps(implementation)
    def run(*args: Any) -> Any:
        return implementation(
            *chain.from_iterable(kernel_arguments(a) if isinstance(a, Quantizer) else (a,) for a in args)
        )

    return run


quantize_with_amax = takes_quantizer(kernels.quantize)
"""The launches of `te.quantize` with a third argument, x's amax (fp32 [1]), where that is known already: one pass over x."""


@te_op(reference=takes_quantizer(kernels.quantize_reference), kernel=takes_quantizer(kernels.quantize))
def quantize(x: torch.Tensor, quantizer: Quantizer) -> list[torch.Tensor]:
    """x (any rank, read as [M, K], contiguous, bf16, fp16 or fp32) into its quantizer's buffers."""
    return quantized(x, quantizer)
