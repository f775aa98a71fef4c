"""Lists of operations that each shipped fusion of operations takes, and the fusions by name."""

from __future__ import annotations

import re

from te_dynamo.operations import (
    GELU,
    AddExtraInput,
    BasicLinear,
    Bias,
    ConstantScale,
    MakeExtraOutput,
    RMSNorm,
)
from te_dynamo.operations.basic import GroupedLinear
from te_dynamo.operations.fused import SHIPPED

BY_NAME = {re.split(r"[.(]", fusion.__qualname__)[0]: fusion for each in SHIPPED.values() for fusion in each}

LISTS = {
    "fuse_linear_bias_add": [BasicLinear(64, 64), Bias(64), AddExtraInput()],
    "fuse_linear_scale_add": [BasicLinear(64, 64), ConstantScale(0.5), AddExtraInput()],
    "fuse_linear_bias_activation": [BasicLinear(64, 96), Bias(96), GELU("tanh")],
    "fuse_activation_bias": [BasicLinear(64, 96), Bias(96), GELU()],
    "fuse_backward_linear_scale": [BasicLinear(64, 96), ConstantScale(0.5)],
    "fuse_backward_linear_add": [MakeExtraOutput(), BasicLinear(64, 96)],
    "fuse_backward_add_rms_norm": [MakeExtraOutput(), RMSNorm(64), BasicLinear(64, 96)],
    "fuse_layer_norm_linear": [RMSNorm(64), BasicLinear(64, 96), Bias(96)],
    "layer_norm_mlp": [RMSNorm(64), BasicLinear(64, 96), GELU(), BasicLinear(96, 64)],
    "fuse_grouped_mlp": [GroupedLinear(2, 64, 96), GELU(), GroupedLinear(2, 96, 64)],
}
