"""The `te::` operations. Importing this registers them."""

from te_dynamo.ops import activation, gemm, grouped_linear, linear, norm, quantize, swiglu
from te_dynamo.ops.define import KERNELS, is_te
from te_dynamo.ops.grouped_linear import GroupedLinearConfig
from te_dynamo.ops.linear import LinearConfig

__all__ = [
    "KERNELS",
    "GroupedLinearConfig",
    "LinearConfig",
    "activation",
    "gemm",
    "grouped_linear",
    "is_te",
    "linear",
    "norm",
    "quantize",
    "swiglu",
]
