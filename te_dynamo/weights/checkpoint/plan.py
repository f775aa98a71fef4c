"""Every tensor of a file against every parameter of a model. All that can be wrong is found here, before the model is changed."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from te_dynamo.errors import CheckpointError
from te_dynamo.quantized.tensor import QuantizedTensor
from te_dynamo.user_code import modules_at, without_wrappers
from te_dynamo.weights.checkpoint.files import of_its_form
from te_dynamo.weights.checkpoint.form import Config, Form, Stored
from te_dynamo.weights.checkpoint.forms import form_of
from te_dynamo.weights.checkpoint.kinds import FLOATS, KINDS, check_scale
from te_dynamo.weights.checkpoint.record import note_stored

INITIALIZER = "_init_weights"
"""The method by which a model of transformers makes what a module has at first: it computes buffers of its configuration again."""

PLAIN = (Tensor, nn.Parameter, nn.Buffer, QuantizedTensor)


@dataclasses.dataclass
class Place:
    """A parameter or buffer of a model, with all the places that hold it: (module, name there, the module's path)."""

    tensor: Tensor
    owners: list[tuple[nn.Module, str, str]]

    @property
    def names(self) -> list[str]:
        return [f"{path}.{name}".removeprefix(".") for _, name, path in self.owners]

    @property
    def is_parameter(self) -> bool:
        module, name, _ = self.owners[0]
        return name in module._parameters


_OF_CACHE = re.compile(r"(.+)\.(?:[qkv]_scale|kv_scale|(?<=[kv]_proj\.)output_scale)")
"""The names that vLLM reads, of compressed-tensors and Model Optimizer: in the attention, or in its projections."""


@dataclasses.dataclass
class Plan:
    """What each place of a model gets from a file: one of its weights, or the tensor of that name. aside: scales of a KV cache, which has no place
    in a model."""

    form: Form
    stored: list[tuple[Place, Stored]]
    plain: list[tuple[Place, str]]
    aside: list[str] = dataclasses.field(default_factory=list)


def places(model: nn.Module) -> Iterator[Place]:
    """The parameters and persistent buffers of a model, each once."""
    found: dict[int, Place] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        kept = {
            name: value for name, value in module._buffers.items() if name not in module._non_persistent_buffers_set
        }
        for name, tensor in {**module._parameters, **kept}.items():
            if tensor is not None:
                found.setdefault(id(tensor), Place(tensor, [])).owners.append((module, name, without_wrappers(path)))
    yield from found.values()


def plan(
    model: nn.Module, config: Config, metas: Mapping[str, Tensor], tensors: Mapping[str, Tensor], partial: bool = False
) -> Plan:
    """metas: the tensors on meta. tensors: the same, read when they are asked for. partial: the model may have more. Raises CheckpointError for
    what does not fit."""
    with of_its_form("the configuration"):
        form = form_of(config)
    made, missing = Plan(form, [], []), []
    for place in places(model):
        found = [entry for owner in place.owners if (entry := _entry(place, owner, form, config, metas)) is not None]
        if len(found) > 1 and (any(isinstance(entry, Stored) for entry in found) or not _alike(found, tensors)):
            raise CheckpointError(
                f"{' and '.join(map(repr, place.names))} are one tensor in the model and two in the file: untie them"
            )
        if not found:
            if place.is_parameter or place.tensor.is_meta:
                missing += place.names[:1]
        elif isinstance(found[0], Stored):
            if len(place.owners) > 1:
                raise CheckpointError(
                    f"{' and '.join(map(repr, place.names))} are one tensor, which is quantized in the file: untie them"
                )
            made.stored.append((place, found[0]))
        else:
            made.plain += [(place, name) for name in found]  # type: ignore[misc]
    made.aside = _scales_of_a_cache(model, config, metas)
    _check_all_used(made, metas, [] if partial else missing)
    for path in () if hasattr(model, INITIALIZER) else not_in_files(model):
        raise CheckpointError(f"buffers of {path!r} are on meta, and no file has them: make that module on a device")
    powers = {True}
    for place, stored in made.stored:
        for role in set(stored.names) - {"codes"}:
            are_powers = check_scale(tensors[stored.names[role]], stored.names[role])
            powers |= {are_powers} if role == "scale" else set()
        for name in stored.beside() if stored.kind == "tensor" else ():
            if place.tensor.dim() == 2 and (metas[name].numel() != 1 or metas[name].dtype not in FLOATS):
                there = f"{metas[name].dtype} {list(metas[name].shape)}"
                raise CheckpointError(
                    f"{name!r} is {there}; a static scale of activations is one number in {FLOATS[0]}"
                )
            check_scale(tensors[name], name)
    if powers == {True}:  # scale_fmt says so where a configuration has it
        made.stored = [(place, dataclasses.replace(stored, powers_of_two=True)) for place, stored in made.stored]
    return made


def _scales_of_a_cache(model: nn.Module, config: Config, names: Iterable[str]) -> list[str]:
    """Where the configuration says that the cache is quantized."""
    config = config.get("quantization", config)
    if not (config.get("kv_cache_scheme") or config.get("kv_cache_quant_algo")):
        return []
    modules = modules_at(model)
    return [name for name in names if (found := _OF_CACHE.fullmatch(name)) and found[1] in modules]


def not_in_files(model: nn.Module) -> dict[str, nn.Module]:
    """The modules with a buffer on meta that is not persistent."""
    return {
        path: module
        for path, module in model.named_modules()
        if any(getattr(module._buffers.get(name), "is_meta", False) for name in module._non_persistent_buffers_set)
    }


def _entry(
    place: Place, owner: tuple[nn.Module, str, str], form: Form, config: Config, metas: Mapping[str, Tensor]
) -> Stored | str | None:
    """What the file has for a place under the name of one owner: a quantized weight, the name of a tensor, or nothing."""
    module, name, path = owner
    full = f"{path}.{name}".removeprefix(".")
    if type(place.tensor) not in PLAIN:
        raise CheckpointError(
            f"{full!r} is a {type(place.tensor).__name__}: load the file before the model is wrapped or sharded"
        )
    shape = tuple(place.tensor.shape)
    if place.is_parameter and place.tensor.dim() > 1:
        with of_its_form(f"what the configuration says of {full!r}"):
            kind, ways = form.kind(config, path, name, module), form.spelt(path, name)
        for names in ways:
            if {"codes", "scale"} <= {role for role in names if names[role] in metas}:
                if not kind:
                    raise CheckpointError(
                        f"{names['scale']!r} is in the file, whose configuration says that {full!r} is not quantized"
                    )
                there = {
                    role: metas[of] for role, of in names.items() if of in metas and role in KINDS[kind].like(shape)
                }
                turned = (*shape[:-2], shape[-1], shape[-2])
                transposed = form.transposes and len(shape) == 3
                transposed &= list(there["scale"].shape) == list(KINDS[kind].scale_shape(turned))
                KINDS[kind].check(there, names, turned if transposed else shape)
                powers = there["scale"].dtype.itemsize == 1
                kept: Any = dict.fromkeys(of for of in form.names_beside(path, name) if of in metas)
                spelt = {role: names[role] for role in there}
                return Stored(form.method, kind, spelt, there, powers, kept, transposed)
        codes = next((names for names in ways if names["codes"] in metas and names["codes"] != full), None)
        if codes or (full in metas and metas[full].dtype.itemsize == 1 and place.tensor.is_floating_point()):
            scales = (
                " or ".join(repr(names["scale"]) for names in ways)
                or "a quantization_config that says what its scale is called"
            )
            raise CheckpointError(
                f"{(codes or {'codes': full})['codes']!r} is codes without a scale: {scales} is not in the file"
            )
        if kind and form.says_all and isinstance(module, nn.Linear) and full in metas:
            raise CheckpointError(
                f"{full!r} is {metas[full].dtype} in the file, whose configuration says that it is quantized ({kind})"
            )
    if full not in metas:
        return None
    if place.is_parameter and place.tensor.is_floating_point() and metas[full].dtype.itemsize == 1:
        raise CheckpointError(
            f"{full!r} is {metas[full].dtype} in the file: codes are read of two dimensions or more, convert it"
        )
    if tuple(metas[full].shape) != shape:
        raise CheckpointError(f"{full!r} is {list(metas[full].shape)} in the file and {list(shape)} in the model")
    return full


def _alike(names: list[Any], tensors: Mapping[str, Tensor]) -> bool:
    first, *others = (tensors[name] for name in names)
    return all(torch.equal(first, other) for other in others)


def _check_all_used(made: Plan, metas: Mapping[str, Tensor], missing: list[str]) -> None:
    used = {*made.aside, *(name for _, name in made.plain)}
    for _, stored in made.stored:
        used |= {*stored.names.values(), *stored.kept}
    for names, what in (
        (missing, "in the model and not in the file"),
        (sorted(set(metas) - used), "in the file and have no place in the model"),
    ):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise CheckpointError(f"these are {what}: {', '.join(map(repr, names[:3]))}{more}")


def device_for(place: Place) -> torch.device:
    """Where the place's tensor is, or is made."""
    return torch.get_default_device() if place.tensor.is_meta else place.tensor.device


def fill_stored(place: Place, stored: Stored, form: Form, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    """Makes a place's parameter the QuantizedTensor of its parts, which `tensors` has by their names."""
    parts = {role: tensors[name].to(device_for(place)) for role, name in stored.names.items()}
    if "tensor_scale" in parts:
        parts["tensor_scale"] = form.factor(parts["tensor_scale"])
    held = stored.read(parts, tuple(place.tensor.shape), dtype)
    if stored.kind == "tensor" and (beside := stored.beside()) and held.dim() == 2:
        amax = tensors[beside[0]].float().item() * torch.finfo(torch.float8_e4m3fn).max
        quantizer: Any = dataclasses.replace(held.quantizer, input_amax=amax)  # type: ignore[call-arg]
        held = QuantizedTensor(held.named_buffers(), tuple(held.shape), dtype, quantizer)
    ((module, name, _),) = place.owners
    module._parameters[name] = nn.Parameter(held, requires_grad=False)
    kept = {*stored.kept} | {stored.names[role] for role in ("tensor_scale",) if role in stored.names}
    note_stored(module, name, dataclasses.replace(stored, kept={each: tensors[each] for each in kept}))
