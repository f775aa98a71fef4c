"""Weights that are quantized one behind the other, to be kept: the amaxes of several are found in one launch.

A model's weights are quantized again behind each step of its optimizer. One by one they take two launches each, and a launch takes the CPU
longer than small weights take the GPU. In graphs passes/dialect/shared_amaxes.py does the same, by the same rule. Every bit is the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

from te_dynamo.dialect.quantize import amaxes, finds_amax, quantize_with_amax, share_amaxes_launch
from te_dynamo.dialect.stacked import quantize_stacked, quantize_stacked_with_amaxes
from te_dynamo.quantized.quantize import quantize_tensor
from te_dynamo.quantized.quantizers import Quantizer


class Values(NamedTuple):
    """What goes into the buffers of one quantizer: a tensor, or those of a stack by rows. Contiguous."""

    tensors: list[torch.Tensor]
    quantizer: Quantizer


def quantize_together(several: Iterable[Values]) -> Iterator[list[torch.Tensor]]:
    """The buffers of each, in order, each made when it is asked for; values are taken for one launch of amaxes at a time, and one ahead."""
    group: list[Values] = []
    for values in several:
        if group and not _share_a_launch([*group, values]):
            yield from _quantized(group)
            group = []
        group.append(values)
    yield from _quantized(group)


def _share_a_launch(group: list[Values]) -> bool:
    apart = all(finds_amax(x, values.quantizer) for values in group for x in values.tensors)
    return apart and share_amaxes_launch([x for values in group for x in values.tensors])


def _quantized(group: list[Values]) -> Iterator[list[torch.Tensor]]:
    if len(group) == 1:
        ((tensors, quantizer),) = group
        yield (
            quantize_tensor(tensors[0], quantizer) if len(tensors) == 1 else quantize_stacked(tensors, quantizer, False)
        )
    elif group:
        found = iter(amaxes([x for values in group for x in values.tensors]))
        for tensors, quantizer in group:
            own = [next(found) for _ in tensors]
            if len(tensors) == 1:
                yield quantize_with_amax(tensors[0], quantizer, own[0])
            else:
                yield quantize_stacked_with_amaxes(tensors, quantizer, False, own)
