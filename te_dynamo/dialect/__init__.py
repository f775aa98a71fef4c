"""The `te::` operations, which graphs hold. Importing this registers them."""

from te_dynamo.dialect import (  # noqa: F401
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
