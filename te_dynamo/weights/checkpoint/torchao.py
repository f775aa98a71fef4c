"""quant_method "torchao": tensor subclasses, flattened; the files' own metadata has each one's class and fields.

M._P_qdata  M._P_scale  M._P_per_tensor_scale     beside: M._P_act_per_tensor_scale

In memory they are the same: `as_quantized`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from torch import nn

from te_dynamo.errors import CheckpointError
from te_dynamo.quantized.tensor import QuantizedTensor
from te_dynamo.weights.checkpoint.form import Config, Form, named_kind
from te_dynamo.weights.checkpoint.kinds import KINDS, Parts


class TorchAO(Form):
    method = "torchao"
    names = ({"codes": "{m}_{p}_qdata", "scale": "{m}_{p}_scale", "tensor_scale": "{m}_{p}_per_tensor_scale"},)
    beside = ("{m}_{p}_act_per_tensor_scale",)

    def kind(self, config: Config, path: str, parameter: str, module: nn.Module) -> str:
        described = config["tensors"].get(f"{path}.{parameter}".removeprefix("."), {"_type": "Tensor"})
        name, fields = described["_type"], described.get("_data", {})
        if name in ("Tensor", "Parameter"):
            return ""
        if "elem_dtype" in fields:
            fields = {**fields, "elem_dtype": fields["elem_dtype"]["_data"]}
        return _kind(name, fields, tuple(getattr(module, parameter).shape), f"{path}.{parameter}")


def _kind(cls: str, fields: Mapping[str, Any], shape: tuple[int, ...], name: str) -> str:
    """That of a tensor of torchao's, by its class and fields."""
    if fields.get("is_swizzled_scales"):
        raise CheckpointError(f"{name}: its scales are swizzled, for one kind of GPU: save it with plain ones")
    if cls == "Float8Tensor":
        known = {(128, 128): "block", (*(1 for _ in shape[1:]), shape[-1]): "row", shape: "tensor"}
        return named_kind(f"block_size of {name}", tuple(fields["block_size"]), known)
    if cls == "MXTensor":
        elements = {("float8_e4m3fn", 32): "mxfp8", ("float4_e2m1fn_x2", 32): "mxfp4"}
        return named_kind("(elem_dtype, block_size)", (fields["elem_dtype"], fields["block_size"]), elements)
    if cls == "NVFP4Tensor":
        return "nvfp4"
    raise CheckpointError(f"the tensor class {cls!r} is not known; known are 'Float8Tensor', 'MXTensor', 'NVFP4Tensor'")


def is_torchao(tensor: Any) -> bool:
    """Whether it is of a tensor class of torchao."""
    return f"{type(tensor).__module__}.".startswith("torchao.")


def is_readable(tensor: Any) -> bool:
    """Whether it is one that `as_quantized` takes."""
    if not is_torchao(tensor):
        return False
    try:
        return bool(live_kind(tensor))
    except CheckpointError:
        return False


def live_kind(tensor: Any) -> str:
    """The kind of a tensor of torchao's in memory. Raises CheckpointError for one that has no kind here."""
    fields = {name: getattr(tensor, name, None) for name in ("block_size", "is_swizzled_scales")}
    fields["elem_dtype"] = str(getattr(tensor, "elem_dtype", "")).removeprefix("torch.")
    name, shape = type(tensor).__name__, tuple(tensor.shape)
    kind = _kind(name, fields, shape, name)
    parts = _parts(tensor)
    KINDS[kind].check(parts, dict.fromkeys(parts, name), shape)
    return kind


def as_quantized(tensor: Any) -> QuantizedTensor:
    """The tensor over the same codes and scales."""
    return KINDS[live_kind(tensor)].read(_parts(tensor), tuple(tensor.shape), tensor.dtype, False)


def _parts(tensor: Any) -> Parts:
    held = {"codes": tensor.qdata, "scale": tensor.scale, "tensor_scale": getattr(tensor, "per_tensor_scale", None)}
    return {role: part for role, part in held.items() if part is not None}


def from_metadata(metadata: Mapping[str, str]) -> dict[str, Any]:
    """The configuration that the files' metadata is; empty where no torchao has written them."""
    if "tensor_names" not in metadata:
        return {}
    return {
        "quant_method": TorchAO.method,
        "tensors": {name: json.loads(metadata[name]) for name in json.loads(metadata["tensor_names"])},
    }
