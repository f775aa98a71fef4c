"""`save_checkpoint`: a model's weights as FP8 or FP4 codes in files that other libraries read."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterator, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from te_dynamo.dialect.quantize import INPUT_DTYPES
from te_dynamo.errors import CheckpointError, InvalidOptionError
from te_dynamo.options import UNSET, Options
from te_dynamo.quantized.quantizers import Quantizer
from te_dynamo.quantized.tensor import QuantizedTensor, from_storage
from te_dynamo.recipe import Recipe
from te_dynamo.weights.cache import dequantized, kept_storage
from te_dynamo.weights.checkpoint.files import NAMES, Written, write_files
from te_dynamo.weights.checkpoint.form import Form, Stored
from te_dynamo.weights.checkpoint.forms import form_named, form_of
from te_dynamo.weights.checkpoint.kinds import KINDS
from te_dynamo.weights.checkpoint.plan import PLAIN, Place, places
from te_dynamo.weights.checkpoint.record import Record, record_of, stored_of
from te_dynamo.weights.frozen import FROZEN, is_dropped, values_of


def save_checkpoint(
    model: nn.Module,
    path: str | PathLike[str],
    form: str | None = None,
    *,
    recipe: str | Recipe | None = UNSET,
    rules: Sequence[tuple[str, str | Recipe | None]] = (),
    shard_bytes: int = 5 * 10**9,
) -> None:
    """Writes a folder of safetensors and a config.json that names the quantization.

    form:   "fp8" (128x128 blocks, as DeepSeek's), "compressed-tensors" or "modelopt"; None writes what came from a file as it was: the same
            tensors, byte for byte.
    recipe, rules: those that the model is compiled with. A linear's weight gets the codes that its forward multiplies by; other tensors, tied
            ones and linears without a recipe, or of a dtype or sizes that its GEMMs do not take as they are, stay plain. Without, "fp8" takes
            float8_block_scaling and others float8_current_scaling.
    shard_bytes: the most bytes a file has.

    Raises CheckpointError for a folder that has a checkpoint already, a model that came from no file without `form`, a weight from a file that
    was exchanged or moved since, a tensor of another class (a DTensor) or dtype than files have, and a recipe whose format the form does not have.
    """
    if not isinstance(shard_bytes, int) or shard_bytes < 1:
        raise InvalidOptionError(f"save_checkpoint: shard_bytes is a number of bytes, got {shard_bytes!r}")
    model, folder = getattr(model, "_orig_mod", model), Path(path)
    record = record_of(model)
    if form is None and record is None:
        raise CheckpointError("save_checkpoint: the model came from no file: form= names the one to write")
    if any(folder.glob("*.safetensors")):
        raise CheckpointError(f"save_checkpoint: {folder} has a checkpoint already: name another folder, or delete it")
    record = record or Record()
    target = form_of(record.quantization) if form is None else form_named(form)
    options = None
    if form is not None:
        options = Options.parse(
            {"recipe": target.recipe if recipe is UNSET else recipe, "rules": list(rules)}
        ).in_model(model)
    weights = [_weight(place, target, options) for place in places(model)]
    if form is None:
        weights = [weight for weight in weights if _was_read(weight, record)]
    beside = record.files
    if form is not None:
        beside = {"config.json": {**_config_of(model, record), "quantization_config": _configuration(weights, target)}}
        generation: Any = getattr(model, "generation_config", None)
        if hasattr(generation, "to_json_string"):
            beside["generation_config.json"] = json.loads(generation.to_json_string())
    read = record if form is None else Record()
    tensors = _tensors(weights, target, read)
    folder.mkdir(parents=True, exist_ok=True)
    with torch.no_grad():
        write_files(folder, tensors, read.metadata, shard_bytes)
    for name, content in beside.items():
        (folder / name).write_text(json.dumps(content, indent=2))


@dataclasses.dataclass(eq=False)
class _Weight:
    """A tensor of the model. stored: how it is written, None as it is. quantizer: what makes codes of a plain one."""

    place: Place
    stored: Stored | None = None
    quantizer: Quantizer | None = None

    def held(self) -> QuantizedTensor:
        """The codes that a forward multiplies by."""
        tensor = self.place.tensor
        if isinstance(tensor, QuantizedTensor):
            return tensor
        assert self.quantizer is not None
        if not _is_gone(tensor):
            return self.quantizer.quantize(values_of(tensor))
        storage = kept_storage(tensor)
        if storage.quantizer.with_usage(True, True) != self.quantizer.with_usage(True, True):
            there, wanted = storage.quantizer.in_words(), self.quantizer.in_words()
            raise CheckpointError(
                f"{self.place.names[0]!r} is dropped, and its codes are {there}, not {wanted}: give recipe= that it is compiled with"
            )
        return from_storage(storage)

    def part(self, role: str, form: Form) -> Tensor:
        """Its codes, or one of its scales."""
        assert self.stored is not None
        if (name := self.stored.names[role]) in self.stored.kept:
            return self.stored.kept[name].clone()
        part = self.stored.write(self.held())[role]
        return form.factor(part) if role == "tensor_scale" else part

    def values(self) -> Tensor:
        """Those of a plain one."""
        tensor = self.place.tensor
        return dequantized(tensor) if _is_gone(tensor) else values_of(tensor)


def _was_read(weight: _Weight, record: Record) -> bool:
    """Not so a buffer that the file did not have. Raises CheckpointError for such a parameter."""
    known = weight.stored is not None or any(name in record.dtypes for name in weight.place.names)
    if not known and weight.place.is_parameter:
        name = weight.place.names[0]
        raise CheckpointError(
            f"{name!r} was not in the file: form= names one to write, and adapters have to be merged first"
        )
    return known


def _is_gone(tensor: Tensor) -> bool:
    return is_dropped(tensor) and FROZEN[tensor].source is None


def _weight(place: Place, form: Form, options: Options | None) -> _Weight:
    """options: None where all is written as it was read."""
    (module, name, path), *others = place.owners
    if place.tensor.is_meta:
        raise CheckpointError(
            f"save_checkpoint: {place.names[0]!r} is on meta and has no values: load or make them first"
        )
    made = type(place.tensor)
    if made not in PLAIN or place.tensor.dtype not in NAMES or place.tensor.layout != torch.strided:
        raise CheckpointError(
            f"save_checkpoint: {place.names[0]!r} is a {made.__name__} of {place.tensor.dtype}, which no file has: gather or convert it first"
        )
    noted, shape = stored_of(module, name), tuple(place.tensor.shape)
    if isinstance(place.tensor, QuantizedTensor):
        if noted is not None and noted.form == form.method:
            here = any(noted.names.items() <= names.items() for names in form.spelt(path, name))
            if here and noted.is_of(place.tensor, form):
                return _Weight(place, noted)
        if options is None:
            since = "was not in the file" if noted is None else "was exchanged or moved since"
            raise CheckpointError(f"{place.names[0]!r} is quantized, and {since}: form= names one to write")
        return _Weight(place, form.new(path, name, place.tensor.quantizer, shape))
    if options is None and noted is not None:
        raise CheckpointError(
            f"{place.names[0]!r} was quantized in the file, and is not any more: form= names one to write"
        )
    chosen = (
        options.recipe_for(path)[0]
        if options is not None and isinstance(module, nn.Linear) and name == "weight"
        else None
    )
    if (
        chosen is None
        or others
        or place.tensor.dtype not in INPUT_DTYPES
        or any(size == 0 or size % chosen.alignment for size in shape)
    ):
        return _Weight(place)
    quantizer = chosen.weight_quantizer().with_usage(columnwise=False)
    stored = form.new(path, name, quantizer, shape)
    return _Weight(place, stored, quantizer) if KINDS[stored.kind].divides(shape[-1]) else _Weight(place)


def _configuration(weights: Sequence[_Weight], form: Form) -> dict[str, Any]:
    linears = [
        (each, path)
        for each in weights
        for module, name, path in each.place.owners
        if isinstance(module, nn.Linear) and name == "weight"
    ]
    kinds = {path: each.stored.kind for each, path in linears if each.stored is not None}
    powers = {each.stored.powers_of_two for each, _ in linears if each.stored is not None}
    if not kinds:
        raise CheckpointError("save_checkpoint: no linear of the model has a recipe that takes its sizes and dtype")
    return form.configuration(kinds, [path for each, path in linears if each.stored is None], powers == {True})


def _config_of(model: nn.Module, record: Record) -> dict[str, Any]:
    """config.json of a model of transformers, or of the file."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "to_json_string"):
        return dict(record.files.get("config.json", {}))
    return {**json.loads(config.to_json_string()), "architectures": [type(model).__name__]}


def _tensors(weights: Sequence[_Weight], form: Form, record: Record) -> dict[str, Written]:
    """What the files have, by name. Raises CheckpointError for a name that two tensors would have."""
    tensors: dict[str, Written] = {}
    for name, written in (entry for weight in weights for entry in _entries(weight, form, record)):
        if name in tensors:
            raise CheckpointError(
                f"save_checkpoint: {name!r} is of two tensors in this form: rename the parameter, or name another"
            )
        tensors[name] = written
    kept = [(name, w.stored.kept[name]) for w in weights if w.stored is not None for name in w.stored.beside()]
    for name, tensor in (*kept, *record.aside.items()):  # weights of one module share what is beside them
        tensors.setdefault(name, (tensor.to("meta"), functools.partial(torch.clone, tensor)))
    return tensors


def _entries(weight: _Weight, form: Form, record: Record) -> Iterator[tuple[str, Written]]:
    """(name, tensor) of a weight: its values, or its parts."""
    place, stored = weight.place, weight.stored
    if stored is None:
        name = next((name for name in place.names if name in record.dtypes), place.names[0])
        dtype = record.dtypes.get(name, place.tensor.dtype)
        yield name, (torch.empty(place.tensor.shape, dtype=dtype, device="meta"), lambda: weight.values().to(dtype))
        return
    for role, name in stored.names.items():
        yield name, (stored.like[role], functools.partial(weight.part, role, form))
