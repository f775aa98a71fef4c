"""quant_method "torchao": tensor subclasses, flattened; the files' own metadata has each one's class and fields.

M._P_qdata  M._P_scale  M._P_per_tensor_scale     beside: M._P_act_per_tensor_scale
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from torch import nn

from te_dynamo.errors import CheckpointError
from te_dynamo.weights.checkpoint.form import Config, Form, named_kind


class TorchAO(Form):
    method = "torchao"
    names = ({"codes": "{m}_{p}_qdata", "scale": "{m}_{p}_scale", "tensor_scale": "{m}_{p}_per_tensor_scale"},)
    beside = ("{m}_{p}_act_per_tensor_scale",)

    def kind(self, config: Config, path: str, parameter: str, module: nn.Module) -> str:
        described = config["tensors"].get(f"{path}.{parameter}".removeprefix("."), {"_type": "Tensor"})
        name, fields = described["_type"], described.get("_data", {})
        if name in ("Tensor", "Parameter"):
            return ""
        if fields.get("is_swizzled_scales"):
            raise CheckpointError(
                f"{path}.{parameter}: its scales are swizzled, for one kind of GPU: save it with plain ones"
            )
        if name == "Float8Tensor":
            block = tuple(fields["block_size"])
            shape = tuple(getattr(module, parameter).shape)
            known = {(128, 128): "block", (*(1 for _ in shape[1:]), shape[-1]): "row", shape: "tensor"}
            return named_kind(f"block_size of {path}.{parameter}", block, known)
        if name == "MXTensor":
            element = fields["elem_dtype"]["_data"], fields["block_size"]
            return named_kind(
                "(elem_dtype, block_size)", element, {("float8_e4m3fn", 32): "mxfp8", ("float4_e2m1fn_x2", 32): "mxfp4"}
            )
        return named_kind("the tensor class", name, {"NVFP4Tensor": "nvfp4"})


def from_metadata(metadata: Mapping[str, str]) -> dict[str, Any]:
    """The configuration that the files' metadata is; empty where no torchao has written them."""
    if "tensor_names" not in metadata:
        return {}
    return {
        "quant_method": TorchAO.method,
        "tensors": {name: json.loads(metadata[name]) for name in json.loads(metadata["tensor_names"])},
    }
