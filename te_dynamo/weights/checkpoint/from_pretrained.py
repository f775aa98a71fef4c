"""What `from_pretrained` of transformers calls to give weights as they are stored (`register_in_transformers`).

Before transformers reads a file, each weight that the file quantizes is replaced by parameters for its parts, in the dtypes and shapes of the
headers, and all that can be wrong is found; transformers fills them as it fills any, on the devices that it chooses and with its names; then
they become the QuantizedTensor that they are parts of.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.quantizers import auto
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from te_dynamo.errors import CheckpointError
from te_dynamo.weights.checkpoint.files import Files
from te_dynamo.weights.checkpoint.form import Form
from te_dynamo.weights.checkpoint.forms import form_named, read_config
from te_dynamo.weights.checkpoint.kinds import KINDS
from te_dynamo.weights.checkpoint.plan import fill_stored, plan
from te_dynamo.weights.checkpoint.record import Record, note_record


def register(method: str) -> None:
    """Has transformers load that quant_method so; see `register_in_transformers`."""
    auto.AUTO_QUANTIZATION_CONFIG_MAPPING.pop(method, None)
    auto.AUTO_QUANTIZER_MAPPING.pop(method, None)
    auto.register_quantization_config(method)(StoredConfig)
    auto.register_quantizer(method)(type("StoredQuantizer", (StoredQuantizer,), {"form": form_named(method)}))


class StoredConfig(QuantizationConfigMixin):
    """The configuration of a file, as it is."""

    def __init__(self, **config: Any) -> None:
        self.__dict__.update(config)


class StoredQuantizer(HfQuantizer):
    """form: of the quant_method that it is registered for."""

    requires_calibration = True  # only what a file has quantized
    form: ClassVar[Form]
    is_trainable = is_compileable = True

    def is_serializable(self) -> bool:
        return False  # te_dynamo.save_checkpoint

    @functools.cached_property
    def serialized_names(self) -> dict[str, list[str]]:  # type: ignore[override]
        """What transformers merges of experts, where it merges them."""
        return {"weight": list(self.form.spelt("", "weight")[0].values())}

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> None:
        shards = [Path(file) for file in kwargs["checkpoint_files"]]
        files = Files(shards[0], shards)
        beside, config = read_config(shards[0].parent, files.metadata)
        tensors = _Renamed(model, self.form, config, files)
        self._plan = plan(model, config, tensors.metas, tensors, partial=True)
        self._record = Record(beside, config, files.metadata)
        self._record.dtypes.update({name: tensors.metas[name].dtype for _, name in self._plan.plain})
        for place, stored in self._plan.stored:
            ((module, name, path),) = place.owners
            del module._parameters[name]
            for full in (*stored.names.values(), *stored.kept):
                part = nn.Parameter(tensors.metas[full], requires_grad=False)
                module.register_parameter(full.removeprefix(f"{path}."), part)
            if name not in module._parameters:  # `_init_weights` asks whether it is there, and has values
                module.__dict__[name] = torch.empty(0, device="meta")
                module.__dict__[name]._is_hf_initialized = True

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        for place, stored in self._plan.stored:
            ((module, name, path),) = place.owners
            module.__dict__.pop(name, None)
            parts = {}
            for full in (*stored.names.values(), *stored.kept):
                parts[full] = module._parameters.pop(full.removeprefix(f"{path}.")).data  # type: ignore[union-attr]
            if any(type(part) is not Tensor for part in parts.values()):
                raise CheckpointError(
                    f"'{path}.{name}' was sharded by transformers: load a quantized file without a tp_plan"
                )
            codes = parts[stored.names["codes"]]
            here = torch.empty((), dtype=place.tensor.dtype, device=codes.device).expand(place.tensor.shape)
            fill_stored(dataclasses.replace(place, tensor=here), stored, self.form, parts, here.dtype)
        note_record(model, self._record)
        return model


class _Renamed(Mapping[str, Tensor]):
    """The tensors of files under the names that they have in the model; of several that transformers merges, the values one after another.

    metas: name -> a tensor on meta, of what has a place in the model or is a part of a quantized weight.
    """

    def __init__(self, model: Any, form: Form, config: Mapping[str, Any], files: Files) -> None:
        self._files, self._sources, self.metas = files, dict[str, list[str]](), dict[str, Tensor]()
        state, modules = model.state_dict(), dict(model.named_modules())
        transforms = get_model_conversion_mapping(model)
        renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
        converters = [each for each in transforms if isinstance(each, WeightConverter)]
        for name, meta in files.metas.items():
            path, role, template, parameter = _parsed(name, form)
            base = f"{path}.{parameter}".removeprefix(".")
            full, merged = rename_source_key(base, renamings, converters, model.base_model_prefix, state)
            path, _, parameter = full.rpartition(".")
            full = template.format(m=f"{path}." if path else "", p=parameter)
            if full not in state and (path not in modules or template == "{m}{p}"):
                continue  # transformers says that it has no place
            self._sources.setdefault(full, []).append(name)
            if merged is not None:
                kind = form.kind(config, path, parameter, modules[path])
                if kind and (KINDS[kind].block[0] == 0 or kind == "nvfp4"):
                    raise CheckpointError(
                        f"{name!r}: transformers makes one tensor of it and others, {full!r}, which would need one scale"
                    )
                shape = tuple(state[f"{path}.{parameter}"].shape)
                like = KINDS[kind].like(shape).get(role) if kind else None
                meta = torch.empty(shape if like is None else like.shape, dtype=meta.dtype, device="meta")
            self.metas[full] = meta

    def __getitem__(self, name: str) -> Tensor:
        read = [self._files[source] for source in self._sources[name]]
        return read[0] if len(read) == 1 else torch.cat([each.flatten() for each in read])

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)


def _parsed(name: str, form: Form) -> tuple[str, str, str, str]:
    """(the module's path, the role, "" where it has none, how it is spelt, the parameter) of a name in a file."""
    path, _, leaf = name.rpartition(".")
    spelt = [(role, template) for way in form.names for role, template in way.items() if template != "{m}weight"]
    spelt += [("", template) for template in form.beside]
    for role, template in sorted(spelt, key=lambda each: -len(each[1])):
        found = re.fullmatch(template.replace("{m}", "").replace("{p}", r"(?P<parameter>\w+)"), leaf)
        if found:
            return path, role, template, found.groupdict().get("parameter", "weight")
    return path, "codes", "{m}{p}", leaf
