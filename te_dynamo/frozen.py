"""Which parameters are frozen for inference: what `te_dynamo.freeze` writes and the backend and its graphs read."""

from __future__ import annotations

import dataclasses

import torch
from torch.utils.weak import WeakIdKeyDictionary

from te_dynamo.errors import TeError

__all__ = ["FROZEN", "Frozen", "drop", "frozen_name", "is_dropped", "restore", "values_of"]


@dataclasses.dataclass(slots=True)
class Frozen:
    """One frozen parameter.

    name:    its path in the model that was frozen.
    source:  the values of a dropped parameter as long as no graph has quantized them, None after that.
    address: where a dropped parameter's place holder is; None while it has its own values.
    """

    name: str
    source: torch.Tensor | None = None
    address: int | None = None


FROZEN: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Parameter -> Frozen."""


def frozen_name(parameter: torch.Tensor) -> str:
    """The name that a frozen parameter has in its model, "" for one that is not frozen."""
    frozen = FROZEN.get(parameter)
    return "" if frozen is None else frozen.name


def is_dropped(parameter: torch.Tensor) -> bool:
    """Whether the parameter holds no values of its own."""
    frozen = FROZEN.get(parameter)
    return frozen is not None and frozen.address is not None and parameter.data_ptr() == frozen.address


def drop(parameter: torch.Tensor) -> None:
    """Puts one NaN, seen as many times as there are values, in the place of a frozen parameter's values.

    They stay in `source` until a graph has quantized them. A reader that no graph knows of sees NaN, never old values.
    """
    frozen = FROZEN[parameter]
    frozen.source = parameter.data
    parameter.data = parameter.data.new_full((1,) * parameter.dim(), float("nan")).expand(parameter.shape)
    frozen.address = parameter.data_ptr()


def restore(parameter: torch.Tensor, values: torch.Tensor) -> None:
    """Gives a dropped parameter values again; it stays frozen."""
    frozen = FROZEN[parameter]
    parameter.data = values
    frozen.source = frozen.address = None


def values_of(parameter: torch.Tensor) -> torch.Tensor:
    """What to quantize. Raises TeError for a dropped parameter whose values are gone."""
    if not is_dropped(parameter):
        return parameter.detach()
    source = FROZEN[parameter].source
    if source is None:
        raise TeError(
            f"te_dynamo: the high-precision values of {frozen_name(parameter)!r} were dropped by "
            "te_dynamo.freeze(model, drop_weights=True), and a graph needs them in another form than the one they were "
            "quantized to; load_state_dict brings values back, drop_weights=False keeps them"
        )
    return source
