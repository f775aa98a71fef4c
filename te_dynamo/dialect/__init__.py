"""The `te::` operations, which graphs hold. Importing this registers them."""

from te_dynamo.dialect import (
    activation,
    gated,
    gemm,
    grouped_linear,
    linear,
    norm,
    norm_modulate,
    quantize,
    stacked,
)
from te_dynamo.dialect.define import KERNELS, is_te
from te_dynamo.dialect.grouped_linear import GroupedLinearConfig
from te_dynamo.dialect.linear import LinearConfig

__all__ = [
    "KERNELS",
    "GroupedLinearConfig",
    "LinearConfig",
    "activation",
    "gated",
    "gemm",
    "grouped_linear",
    "is_te",
    "linear",
    "norm",
    "norm_modulate",
    "quantize",
    "stacked",
]
