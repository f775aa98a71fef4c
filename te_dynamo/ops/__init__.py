"""The `te::` operations. Importing this registers them. The classes of `te_dynamo.operations` are here too."""

from te_dynamo.ops import (
    activation,
    gemm,
    gemm_swiglu,
    grouped_linear,
    linear,
    norm,
    norm_add,
    quantize,
    quantize_bias_grad,
    stacked,
    swiglu,
    transpose,
)
from te_dynamo.ops.define import KERNELS, is_te
from te_dynamo.ops.grouped_linear import GroupedLinearConfig
from te_dynamo.ops.linear import LinearConfig

# isort: split
from te_dynamo import operations  # on top of the above
from te_dynamo.operations import *  # noqa: F403

__all__ = [
    "KERNELS",
    "GroupedLinearConfig",
    "LinearConfig",
    "activation",
    "gemm",
    "gemm_swiglu",
    "grouped_linear",
    "is_te",
    "linear",
    "norm",
    "norm_add",
    "quantize",
    "quantize_bias_grad",
    "stacked",
    "swiglu",
    "transpose",
]
__all__ += operations.__all__
