"""Which parameters are frozen for inference: what `te_dynamo.freeze` writes and the backend and its graphs read."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from te_dynamo.errors import KeptWeightError


@dataclasses.dataclass(slots=True)
class Frozen:
    """One frozen parameter.

    name:         its path in the model that was frozen.
    source:       the values of a dropped parameter as long as no graph has quantized them, None after that.
    place_holder: what a dropped parameter holds in their place; None while it has its own. It lives on here, so that no
                  other memory has its address.
    lent:         while a dropped parameter has values for a loader to write over: the loader's thread, and the version
                  counter and address by which a write is told.
    """

    name: str
    source: torch.Tensor | None = None
    place_holder: torch.Tensor | None = None
    lent: tuple[int, int, int] | None = None


FROZEN: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Parameter -> Frozen."""

lock = threading.RLock()
"""Held while what a parameter holds is exchanged, and while what is kept of it is made: another thread sees no half of it."""


def frozen_name(parameter: torch.Tensor) -> str:
    """The name that a frozen parameter has in its model, "" for one that is not frozen."""
    frozen = FROZEN.get(parameter)
    return "" if frozen is None else frozen.name


def place_of(parameter: torch.Tensor) -> torch.Tensor:
    """The tensor whose memory the parameter's values are in: its place holder while it has only what was lent to it."""
    frozen = FROZEN.get(parameter)
    lent = None if frozen is None else frozen.lent
    if lent is None or lent[1:] != (parameter._version, parameter.data_ptr()):
        return parameter
    return frozen.place_holder


def is_dropped(parameter: torch.Tensor) -> bool:
    """Whether the parameter holds no values of its own."""
    frozen = FROZEN.get(parameter)
    held, place = None if frozen is None else frozen.place_holder, place_of(parameter)
    return held is not None and (place is held or place.data_ptr() == held.data_ptr())


def is_part(weight: Any) -> bool:
    """Whether it is a parameter in a part of larger memory (a flat buffer): `parameter.data = view` shares no version counter with what it
    views, so that a write to the whole shows nowhere."""
    plain = type(weight) is torch.nn.Parameter
    return plain and weight.untyped_storage().nbytes() > weight.numel() * weight.element_size()


def drop(parameter: torch.Tensor) -> None:
    """Puts one NaN, seen as many times as there are values, in the place of a frozen parameter's values.

    They stay in `source` until a graph has quantized them. A reader that no graph knows of sees NaN, never old values.
    """
    frozen = FROZEN[parameter]
    with lock, torch.inference_mode(False):  # tensors made under it have no version counter
        frozen.source, frozen.lent = parameter.data, None
        one = parameter.data.new_full((1,) * parameter.dim(), float("nan"))
        parameter.data = frozen.place_holder = one.expand(parameter.shape)


def restore(parameter: torch.Tensor, values: torch.Tensor) -> None:
    """Gives a dropped parameter values again; it stays frozen."""
    frozen = FROZEN[parameter]
    with lock:
        parameter.data = values
        frozen.source = frozen.place_holder = frozen.lent = None


def lend(parameter: torch.Tensor, values: torch.Tensor) -> None:
    """Gives a dropped parameter its values for as long as a loader may write over them; it counts as dropped until then."""
    with lock:
        parameter.data = values
        FROZEN[parameter].lent = threading.get_ident(), parameter._version, values.data_ptr()


def end_load(parameter: torch.Tensor, dequantized: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Takes back what was lent. If it was written, that is the parameter's new value, dropped and to be quantized.

    dequantized: gives the values of a dropped parameter again; they tell of a write through .data, which no counter shows.
    """
    with lock:
        frozen = FROZEN.get(parameter)
        if frozen is None or frozen.lent is None:
            return
        written = not is_dropped(parameter)
        if not written and frozen.source is None and not parameter.is_meta:
            written = not torch.equal(parameter.data.view(torch.uint8), dequantized(parameter).view(torch.uint8))
        if not written:
            parameter.data, frozen.lent = frozen.place_holder, None
        else:
            drop(parameter)


def end_own_load(parameter: torch.Tensor, dequantized: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """`end_load` for a load of this thread, which is over by now: a hook raised, or the loader runs no hooks after it."""
    frozen = FROZEN.get(parameter)
    lent = None if frozen is None else frozen.lent
    if lent is not None and lent[0] == threading.get_ident():
        end_load(parameter, dequantized)


def values_of(parameter: torch.Tensor) -> torch.Tensor:
    """The values to quantize. Raises KeptWeightError for a dropped parameter whose values are gone, or whose place holder was converted."""
    frozen = FROZEN.get(parameter)
    if frozen is None or frozen.place_holder is None:
        return parameter.detach()
    if not is_dropped(parameter):
        if frozen.lent is None:
            _check_given_values(parameter, frozen)
        return parameter.detach()
    if frozen.source is None:
        raise KeptWeightError(
            f"te_dynamo: the high-precision values of {frozen.name!r} were dropped by "
            "te_dynamo.freeze(model, drop_weights=True), and a graph needs them in another form than the one they were "
            "quantized to; load_state_dict brings values back, drop_weights=False keeps them"
        )
    return frozen.source


def _check_given_values(parameter: torch.Tensor, frozen: Frozen) -> None:
    """Something else than a load put other memory in the place holder's place: values, or its conversion."""
    if parameter.isnan().all():
        raise KeptWeightError(
            f"te_dynamo: the high-precision values of {frozen.name!r} were dropped by "
            "te_dynamo.freeze(model, drop_weights=True), and what holds their place was moved or cast "
            f"(to {parameter.dtype} on {parameter.device}); call te_dynamo.unfreeze(model) before Module.to, or load_state_dict after it"
        )
    frozen.source = frozen.place_holder = None
