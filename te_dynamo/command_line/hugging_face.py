"""hf:CONFIG.json and hf:CLASS: models of transformers with random weights. Nothing is downloaded."""

from __future__ import annotations

import difflib
import json
from typing import Any

import torch

from te_dynamo.command_line.failure import Failure, one_line
from te_dynamo.command_line.memory import free_bytes


def build(name: str, device: str) -> Any:
    """The model of a configuration file, or of a class by its own default configuration; in bf16 unless the configuration has a dtype.

    device: where it is made; "" for the CPU. Raises Failure for a name that transformers lacks, where it is not installed, and
    for a model that does not fit into memory: that is counted on the meta device first.
    """
    try:
        import transformers
    except ImportError as error:
        raise Failure(f"hf:{name} needs the package transformers: pip install transformers", status=2) from error
    try:
        cls, config = _of_file(transformers, name) if name.endswith(".json") else _of_class(transformers, name)
        config.use_cache = False
        dtype = config.dtype if isinstance(config.dtype, torch.dtype) else torch.bfloat16
        model = _made(cls, config, "meta")
        if device != "meta":
            _check_memory(name, model, dtype, device)
            model = _made(cls, config, device or "cpu")
        return model.to(dtype)
    except Failure:
        raise
    except Exception as error:
        raise Failure(f"hf:{name}: transformers cannot make it: {one_line(error)}; --debug shows where") from error


def _made(cls: Any, config: Any, device: str) -> Any:
    with torch.device(device):
        return cls(config) if getattr(cls, "config_class", None) else cls.from_config(config)


def _check_memory(name: str, on_meta: Any, dtype: torch.dtype, device: str) -> None:
    """Raises Failure where the weights as they are made, or the weights and their gradients in `dtype`, do not fit."""
    parameters = list(on_meta.parameters())
    count = sum(parameter.numel() for parameter in parameters)
    needed = max(sum(parameter.nbytes for parameter in parameters), 2 * count * dtype.itemsize)
    if needed > (free := free_bytes(device)):
        raise Failure(
            f"hf:{name} has {count / 1e9:.1f} billion parameters: with gradients they take {needed / 2**30:.1f} GiB, and {free / 2**30:.1f} "
            "GiB are free; `te-dynamo explain --device h200` makes no weights, and hf:CONFIG.json takes fewer layers",
            status=2,
        )


def _of_class(transformers: Any, name: str) -> tuple[Any, Any]:
    cls = getattr(transformers, name, None)
    if cls is None or getattr(cls, "config_class", None) is None:
        names = [n for n in dir(transformers) if n.startswith(name[:1]) and n != name]
        near = difflib.get_close_matches(name, names, n=1) if cls is None else []
        hint = f"did you mean {near[0]!r}?" if near else "name one such as LlamaForCausalLM"
        raise Failure(f"hf:{name}: transformers has no model class {name!r}; {hint}", status=2)
    return cls, cls.config_class()


def _of_file(transformers: Any, path: str) -> tuple[Any, Any]:
    try:
        with open(path) as file:
            given = json.load(file)
        model_type = given.pop("model_type")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Failure(
            f"hf:{path}: no configuration of transformers with a model_type can be read: {one_line(error)}", status=2
        ) from error
    config = transformers.AutoConfig.for_model(model_type, **given)
    architecture = next(iter(given.get("architectures") or ()), "")
    return getattr(transformers, architecture, transformers.AutoModelForCausalLM), config
