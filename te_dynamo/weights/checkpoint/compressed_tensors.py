"""quant_method "compressed-tensors", of llm-compressor and vLLM: groups of modules with a scheme each.

    P  P_scale | P_packed  P_scale  P_global_scale     beside: input_scale, input_global_scale of static activations

P_global_scale is 448 * 6 / amax: values are divided by it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import nn

from te_dynamo.weights.checkpoint.form import Config, Form, matches, named_kind

_SCHEMES: dict[str, tuple[Any, ...]] = {  # num_bits, type, strategy, group_size
    "tensor": (8, "float", "tensor", None),
    "row": (8, "float", "channel", None),
    "block": (8, "float", "block", None),
    "mxfp8": (8, "float", "group", 32),
    "mxfp4": (4, "float", "group", 32),
    "nvfp4": (4, "float", "tensor_group", 16),
}
_FORMATS = {"mxfp8": "mxfp8-quantized", "mxfp4": "mxfp4-pack-quantized", "nvfp4": "nvfp4-pack-quantized"}
_ACTIVATIONS: dict[str, dict[str, Any]] = {
    "tensor": {"strategy": "tensor", "dynamic": True},
    "row": {"strategy": "token", "dynamic": True},
    "block": {"strategy": "group", "group_size": 128, "dynamic": True},
    "mxfp8": {"strategy": "group", "group_size": 32, "dynamic": True, "scale_dtype": "torch.uint8"},
}


class CompressedTensors(Form):
    method = "compressed-tensors"
    names = (
        {"codes": "{m}{p}_packed", "scale": "{m}{p}_scale", "tensor_scale": "{m}{p}_global_scale"},
        {"codes": "{m}{p}", "scale": "{m}{p}_scale"},
    )
    beside = ("{m}input_scale", "{m}input_global_scale")
    divides = says_all = True
    writes = tuple(_SCHEMES)

    def kind(self, config: Config, path: str, parameter: str, module: nn.Module) -> str:
        for group in () if matches(path, module, config.get("ignore")) else config.get("config_groups", {}).values():
            if matches(path, module, group["targets"]):
                weights = group.get("weights") or {}
                scheme = tuple(weights.get(key) for key in ("num_bits", "type", "strategy", "group_size"))
                kind = named_kind(
                    "the scheme (num_bits, type, strategy, group_size)", scheme, {v: k for k, v in _SCHEMES.items()}
                )
                if kind == "block":
                    named_kind("block_structure", tuple(weights.get("block_structure") or ()), {(128, 128): kind})
                return kind
        return ""

    def spelling(self, kind: str, path: str, parameter: str) -> dict[str, str]:
        return self.spelt(path, parameter)[0 if kind in ("mxfp4", "nvfp4") else 1]

    def configuration(self, kinds: Mapping[str, str], left: Collection[str], powers_of_two: bool) -> dict[str, Any]:
        groups: dict[str, Any] = {}
        found = sorted(set(kinds.values()))
        for kind in found:
            paths = sorted(path for path in kinds if kinds[path] == kind)
            scheme = dict(zip(("num_bits", "type", "strategy", "group_size"), _SCHEMES[kind], strict=True))
            block = {"block_structure": [128, 128]} if kind == "block" else {}
            dtype = {"scale_dtype": "torch.uint8"} if kind.startswith("mx") else {}
            inputs = _ACTIVATIONS.get(kind)
            groups[f"group_{len(groups)}"] = {
                "targets": ["Linear"] if len(found) == 1 else paths,
                "weights": {**scheme, **block, **dtype, "dynamic": False, "symmetric": True},
                "input_activations": inputs and {"num_bits": 8, "type": "float", "symmetric": True, **inputs},
                "format": _FORMATS.get(kind, "float-quantized"),
            }
        formats = [group["format"] for group in groups.values()]
        return {
            "quant_method": self.method,
            "format": formats[0] if len(set(formats)) == 1 else "mixed-precision",
            "quantization_status": "compressed",
            "config_groups": groups,
            "ignore": sorted(left),
        }
