"""What a model remembers of the file that it came from: beside its modules, so that copies and wrapped models have it too."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn

from te_dynamo.weights.checkpoint.form import Stored

_STORED, _RECORD = "_te_stored", "_te_checkpoint"


@dataclasses.dataclass
class Record:
    """files: name -> JSON beside the tensors. quantization: what they say of it. metadata: the tensors' own. dtypes: of the plain ones.
    aside: tensors that nothing here reads."""

    files: dict[str, Any] = dataclasses.field(default_factory=dict)
    quantization: dict[str, Any] = dataclasses.field(default_factory=dict)
    metadata: dict[str, str] = dataclasses.field(default_factory=dict)
    dtypes: dict[str, torch.dtype] = dataclasses.field(default_factory=dict)
    aside: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)


def note_stored(module: nn.Module, name: str, stored: Stored | None) -> None:
    """A parameter of a module came from a file so; None: it is plain."""
    held = {**getattr(module, _STORED, {}), name: stored}
    setattr(module, _STORED, {key: value for key, value in held.items() if value is not None})


def stored_of(module: nn.Module, name: str) -> Stored | None:
    """How a parameter of a module lay in its file, None for one that no file has quantized."""
    return getattr(module, _STORED, {}).get(name)  # type: ignore[no-any-return]


def note_record(model: nn.Module, record: Record) -> None:
    setattr(model, _RECORD, record)


def record_of(model: nn.Module) -> Record | None:
    """Of the file that the model came from, or a model in it."""
    return next((vars(module)[_RECORD] for module in model.modules() if _RECORD in vars(module)), None)
