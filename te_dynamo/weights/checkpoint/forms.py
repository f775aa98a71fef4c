"""The table of forms, and which one a folder has."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from te_dynamo.errors import CheckpointError
from te_dynamo.weights.checkpoint.compressed_tensors import CompressedTensors
from te_dynamo.weights.checkpoint.files import read_json
from te_dynamo.weights.checkpoint.form import Config, Form
from te_dynamo.weights.checkpoint.fp8 import FP8
from te_dynamo.weights.checkpoint.modelopt import ModelOpt
from te_dynamo.weights.checkpoint.mxfp4 import MXFP4
from te_dynamo.weights.checkpoint.torchao import TorchAO, from_metadata


class Plain(Form):
    """No configuration: every tensor is what it is."""

    def kind(self, config: Config, path: str, parameter: str, module: nn.Module) -> str:
        return ""


FORMS: dict[str, Form] = {
    form.method: form for form in (FP8(), CompressedTensors(), ModelOpt(), MXFP4(), TorchAO(), Plain())
}


def form_named(method: str) -> Form:
    """The form of that quant_method. Raises CheckpointError with those that are known."""
    if method not in FORMS:
        raise CheckpointError(
            f"quant_method {method!r} is not known; known are {', '.join(repr(name) for name in FORMS if name)}"
        )
    return FORMS[method]


def form_of(config: Config) -> Form:
    """The form of a configuration; one without a quant_method is ModelOpt's older one, or none."""
    older = "quantization" in config or "quant_algo" in config
    return form_named(config.get("quant_method") or (ModelOpt.method if older else ""))


def read_config(folder: Path, metadata: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(file -> JSON, of those that may name a quantization; the configuration that they have, {} without one)"""
    names = ("config.json", "hf_quant_config.json")
    files = {name: read_json(folder / name) for name in names if (folder / name).is_file()}
    whole = files.get("config.json", {})
    return files, from_metadata(metadata) or whole.get("quantization_config") or files.get("hf_quant_config.json", {})
