"""quant_method "modelopt", of NVIDIA's Model Optimizer: an algorithm for the model, or for each module.

    P  P_scale  P_scale_2     beside: input_scale of static activations

P_scale_2 is amax / (448 * 6): values are multiplied by it. Older folders have hf_quant_config.json in place of the quantization_config.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Mapping
from typing import Any

from torch import nn

from te_dynamo.weights.checkpoint.form import Config, Form, named_kind

_ALGORITHMS = {
    "FP8": "tensor",
    "FP8_PER_CHANNEL_PER_TOKEN": "row",
    "FP8_PB_WO": "block",
    "MXFP8": "mxfp8",
    "NVFP4": "nvfp4",
    "W4A16_NVFP4": "nvfp4",
}
_MIXED = "MIXED_PRECISION"


class ModelOpt(Form):
    method = "modelopt"
    names = ({"codes": "{m}{p}", "scale": "{m}{p}_scale", "tensor_scale": "{m}{p}_scale_2"},)
    beside = ("{m}input_scale",)
    says_all = squeezed = True
    writes = ("tensor", "row", "block", "mxfp8", "nvfp4")

    def kind(self, config: Config, path: str, parameter: str, module: nn.Module) -> str:
        config = config.get("quantization", config)
        left = config.get("exclude_modules") or config.get("ignore") or ()
        if any(fnmatch.fnmatchcase(path, pattern) for pattern in left):
            return ""
        algorithm = config.get("quant_algo")
        if algorithm == _MIXED:
            layers = config.get("quantized_layers", {})
            if path not in layers:
                return ""
            algorithm = layers[path]["quant_algo"]
        upper = algorithm.upper() if isinstance(algorithm, str) else algorithm  # it writes fp8_pb_wo, and FP8
        return named_kind("quant_algo", upper, _ALGORITHMS)

    def configuration(self, kinds: Mapping[str, str], left: Collection[str], powers_of_two: bool) -> dict[str, Any]:
        named = {kind: algorithm for algorithm, kind in reversed(_ALGORITHMS.items())}
        algorithms = {path: named[kind] for path, kind in kinds.items()}
        one = len(set(algorithms.values())) == 1
        layers = {} if one else {"quantized_layers": {path: {"quant_algo": name} for path, name in algorithms.items()}}
        algorithm = next(iter(algorithms.values())) if one else _MIXED
        return {"quant_method": self.method, "quant_algo": algorithm, "ignore": sorted(left), **layers}
