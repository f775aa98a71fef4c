"""`load_checkpoint`, `load_quantized` and `register_in_transformers`: the codes and scales of a file become a model's weights, as they are."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from te_dynamo.errors import CheckpointError, InvalidOptionError
from te_dynamo.weights.checkpoint.files import Files, of_its_form, progress
from te_dynamo.weights.checkpoint.form import Stored
from te_dynamo.weights.checkpoint.forms import form_named, read_config
from te_dynamo.weights.checkpoint.modelopt import ModelOpt
from te_dynamo.weights.checkpoint.plan import INITIALIZER, Place, Plan, device_for, fill_stored, not_in_files, plan
from te_dynamo.weights.checkpoint.record import Record, note_record, note_stored
from te_dynamo.weights.checkpoint.torchao import TorchAO


def load_checkpoint(model: nn.Module, path: str | PathLike[str], dtype: torch.dtype | None = None) -> nn.Module:
    """Loads a folder of safetensors whose weights are FP8 or FP4 into a model of the same names; returns the model.

    path:  a folder with config.json, or hf_quant_config.json, or one safetensors file in it.
    dtype: of plain tensors, and of the quantized weights' values; None keeps the model's.

    A quantized weight becomes a parameter that is a `QuantizedTensor` of the file's codes and scales: never dequantized, multiplied as it is, and
    without a gradient. `torch.compile(model, backend="te")` then takes its recipe from it, unless a rule chooses one. Scales of static
    activations are used by `Float8CurrentScaling(static_inputs=True)` alone; else activations are scaled by what they are. One weight is in
    memory twice at a time; a model on meta gets its tensors on torch's default device.

    Raises CheckpointError, which names the tensor, for a file that is cut short, is not known, or does not fit the model, and for scales that
    are missing, left over, zero or no numbers. The model is as it was then.
    """
    model, path = getattr(model, "_orig_mod", model), Path(path)
    files = Files(path)
    with of_its_form(f"{path}: its configuration"):
        beside, config = read_config(path if path.is_dir() else path.parent, files.metadata)
    made = plan(model, config, files.metas, files)
    return _fill(model, made, files, Record(beside, config, files.metadata), dtype)


def load_quantized(
    model: nn.Module, state_dict: Mapping[str, Tensor], config: Mapping[str, Any], dtype: torch.dtype | None = None
) -> nn.Module:
    """`load_checkpoint` of tensors that are in memory already. The model shares codes and scales that lie as it holds them; plain ones are copied.

    config: what config.json has under "quantization_config", or all of it.
    """
    model = getattr(model, "_orig_mod", model)
    with of_its_form("the configuration"):
        config = dict(config.get("quantization_config", config))
    for name, tensor in state_dict.items():
        if not isinstance(tensor, Tensor):
            raise CheckpointError(f"{name!r} is a {type(tensor).__name__}, no tensor: leave it out")
    made = plan(model, config, {name: tensor.to("meta") for name, tensor in state_dict.items()}, state_dict)
    return _fill(model, made, state_dict, Record({"config.json": {"quantization_config": config}}, config), dtype)


def register_in_transformers(*methods: str) -> None:
    """Has `from_pretrained` of transformers load folders with these quant_methods as `load_checkpoint` does, in this process.

    methods: "fp8", "compressed-tensors" and "mxfp4" are taken from transformers' own loaders; without any "modelopt", for which it has none.

    Raises CheckpointError for a method that is not known.
    """
    from te_dynamo.weights.checkpoint.from_pretrained import register

    for method in methods or (ModelOpt.method,):
        if not form_named(method).names or method == TorchAO.method:
            raise CheckpointError(f"{method!r} has no configuration to read: transformers loads such models itself")
    for method in methods or (ModelOpt.method,):
        register(method)


def _fill(
    model: nn.Module, made: Plan, tensors: Mapping[str, Tensor], record: Record, dtype: torch.dtype | None
) -> nn.Module:
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize > 1):
        raise InvalidOptionError(
            f"te_dynamo: dtype is a floating one of 16 bits or more, as torch.bfloat16, got {dtype!r}"
        )
    steps: list[tuple[Place, Any]] = [*made.stored, *made.plain]
    with torch.inference_mode(False), torch.no_grad(), progress() as bar:
        # What transformers computes of a configuration, as rotary frequencies; what it makes of parameters, the file replaces.
        for module in not_in_files(model).values():
            for name, buffer in module._buffers.items():
                if buffer is not None and name in module._non_persistent_buffers_set:
                    module._buffers[name] = torch.empty_like(buffer, device=torch.get_default_device())
            getattr(model, INITIALIZER)(module)
        for place, what in bar.track(steps, description="loading"):
            for module, *_ in place.owners:
                getattr(module, "_workspaces", {}).clear()  # those of te_dynamo.nn
            wanted = dtype if dtype is not None and place.tensor.is_floating_point() else place.tensor.dtype
            if isinstance(what, Stored):
                fill_stored(place, what, made.form, tensors, wanted)
            else:
                record.dtypes[what] = tensors[what].dtype
                # Of a state dict a copy: shared memory would be written through it, unseen by the parameter's version counter.
                given = tensors[what]
                _fill_plain(place, given.to(device_for(place), wanted, copy=not isinstance(tensors, Files)))
        record.aside = {name: tensors[name].clone() for name in made.aside}
    note_record(model, record)
    return model


def _fill_plain(place: Place, values: Tensor) -> None:
    """In place where there is memory, so that a parameter stays who it is."""
    if not place.tensor.is_meta and type(place.tensor) in (Tensor, nn.Parameter):
        place.tensor.data = values
        return
    made: Any = nn.Parameter(values, place.tensor.requires_grad) if place.is_parameter else values
    for module, name, _ in place.owners:
        (module._parameters if place.is_parameter else module._buffers)[name] = made
        note_stored(module, name, None)
