"""Operations' results as one flat list, the form in which a `te::` operation returns them: no result twice, and no input.

    [output, *extra outputs, *tensors to save that are neither an input nor a result already]

It works by identity, on tensors and on protos alike: a fake that returns the proto of its input stands for a forward that returns its
input, so both have the same list.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Optional

import torch

__all__ = ["Flat", "flatten", "unaliased"]


@dataclasses.dataclass
class Flat:
    """results: the list. saved: for each basic operation the places of what it saves, an index into (*inputs, *results)."""

    results: list[Any]
    saved: list[list[Optional[int]]]

    def resolve(self, inputs: Sequence[Any], results: Sequence[Any]) -> list[list[Any]]:
        """The saved tensors of each basic operation, from the tensors of one run."""
        all_tensors = [*inputs, *results]
        return [[None if place is None else all_tensors[place] for place in places] for places in self.saved]


def flatten(
    inputs: Sequence[Any],
    outputs: Sequence[Any],
    saved: Sequence[Sequence[Any]],
    copy: Callable[[Any], Any],
) -> Flat:
    """outputs: the output and the extra outputs; one that is an input or another output is copied."""
    place = {id(tensor): i for i, tensor in reversed(list(enumerate(inputs)))}
    results: list[Any] = []
    for tensor in outputs:
        if id(tensor) in place:
            tensor = copy(tensor)
        place[id(tensor)] = len(inputs) + len(results)
        results.append(tensor)
    for tensor in (tensor for tensors in saved for tensor in tensors):
        if tensor is not None and id(tensor) not in place:
            place[id(tensor)] = len(inputs) + len(results)
            results.append(tensor)
    return Flat(results, [[None if t is None else place[id(t)] for t in tensors] for tensors in saved])


def unaliased(inputs: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The results, those that are views of an input or of another result copied: a custom operation may return no view."""
    seen = {tensor.untyped_storage()._cdata for tensor in inputs}
    fresh = []
    for tensor in results:
        if tensor.untyped_storage()._cdata in seen:
            tensor = tensor.clone()
        seen.add(tensor.untyped_storage()._cdata)
        fresh.append(tensor)
    return fresh
