"""quant_method "fp8", of DeepSeek, Qwen and transformers: 128x128 blocks, or one scale a tensor.

P  P_scale_inv | M.weight  M.scale     beside: activation_scale of static activations
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import nn

from te_dynamo.weights.checkpoint.form import Config, Form, named_kind


class FP8(Form):
    method = "fp8"
    names = (
        {"codes": "{m}{p}", "scale": "{m}{p}_scale_inv"},
        {"codes": "{m}weight", "scale": "{m}scale"},
    )
    beside = ("{m}activation_scale", "{m}{p}_activation_scale")
    writes = ("block",)
    recipe = "float8_block_scaling"

    def kind(self, config: Config, path: str, parameter: str, module: nn.Module) -> str:
        left = config.get("modules_to_not_convert") or config.get("ignored_layers") or ()
        if path in left:
            return ""
        named_kind("expert_dtype", config.get("expert_dtype", "fp8"), {"fp8": "fp8"})
        block = tuple(config.get("weight_block_size") or ())
        return named_kind("weight_block_size", block, {(): "tensor", (128, 128): "block", (1, 32): "mxfp8"})

    def configuration(self, kinds: Mapping[str, str], left: Collection[str], powers_of_two: bool) -> dict[str, Any]:
        return {
            "quant_method": self.method,
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": sorted(left),
        } | ({"scale_fmt": "ue8m0"} if powers_of_two else {})
