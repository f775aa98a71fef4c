"""The `te::` operations. Importing this registers them."""

from te_dynamo.ops import activation, gemm, linear, norm, norm_add, quantize, quantize_bias_grad, swiglu
from te_dynamo.ops.define import KERNELS, is_te
from te_dynamo.ops.linear import LinearConfig

__all__ = [
    "KERNELS",
    "LinearConfig",
    "activation",
    "gemm",
    "is_te",
    "linear",
    "norm",
    "norm_add",
    "quantize",
    "quantize_bias_grad",
    "swiglu",
]
