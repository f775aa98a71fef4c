"""hf:CONFIG.json and hf:CLASS: models of transformers with random weights. Nothing is downloaded."""

from __future__ import annotations

import contextlib
import difflib
import json
from typing import Any

import torch

from te_dynamo.command_line.failure import Failure, one_line

__all__ = ["build"]


def build(name: str, device: str) -> Any:
    """The model of a configuration file, or of a class by its own default configuration; in bf16 unless the configuration has a dtype.

    device: where it is made; "" for the CPU. Raises Failure for a name that transformers lacks, and where it is not installed.
    """
    try:
        import transformers
    except ImportError as error:
        raise Failure(f"hf:{name} needs the package transformers: pip install transformers", status=2) from error
    try:
        cls, config = _of_file(transformers, name) if name.endswith(".json") else _of_class(transformers, name)
        config.use_cache = False
        with torch.device(device) if device else contextlib.nullcontext():
            model = cls(config) if hasattr(cls, "config_class") and cls.config_class else cls.from_config(config)
        return model.to(config.dtype if isinstance(config.dtype, torch.dtype) else torch.bfloat16)
    except Failure:
        raise
    except Exception as error:
        raise Failure(f"hf:{name}: transformers cannot make it: {one_line(error)}; --debug shows where") from error


def _of_class(transformers: Any, name: str) -> tuple[Any, Any]:
    cls = getattr(transformers, name, None)
    if cls is None or getattr(cls, "config_class", None) is None:
        near = difflib.get_close_matches(name, [n for n in dir(transformers) if n.startswith(name[:1])], n=1)
        hint = f"did you mean {near[0]!r}?" if near else "name one such as LlamaForCausalLM"
        raise Failure(f"hf:{name}: transformers has no model class {name!r}; {hint}", status=2)
    return cls, cls.config_class()


def _of_file(transformers: Any, path: str) -> tuple[Any, Any]:
    try:
        with open(path) as file:
            given = json.load(file)
        model_type = given.pop("model_type")
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise Failure(
            f"hf:{path}: no configuration of transformers with a model_type can be read: {one_line(error)}", status=2
        ) from error
    config = transformers.AutoConfig.for_model(model_type, **given)
    architecture = next(iter(given.get("architectures") or ()), "")
    return getattr(transformers, architecture, transformers.AutoModelForCausalLM), config
