"""Hints of one-pass scaling (kernels/tiles/one_pass.py): the scales that a graph's sites had in its last run.

They lie in a small tensor a graph and device, as long as the process lives: each row has the bits of a scale, and its own address. A run
begins with a copy. Kernels guess from the copy, which nothing writes, and write what they find by the address: so no value of a graph,
and nothing that it saves, holds them. Runs on several streams may read and write the rows in any order, which costs recasts alone.
"""

from __future__ import annotations

import concurrent.futures

import torch

from te_dynamo.kernels.runtime.capture import is_captured

_kept: dict[tuple[torch.device, str, int], torch.Tensor] = {}
"""By device, graph and count: a graph compiled for other shapes may have the same name, and other sites that guess."""


def copy_of_hints(like: torch.Tensor, graph: str, count: int) -> torch.Tensor:
    """int64 [count, 2] on like's device: the hints that the last run of `graph` left, with their addresses. Zero before the first."""
    place = like.device, graph, count
    if place not in _kept:
        if is_captured(like.device):
            return _zero_hints(like.device, count)[0]  # in the memory of the CUDA graph: each replay begins with zeros
        with concurrent.futures.ThreadPoolExecutor(1) as other_thread:  # as in scratch.py
            made = other_thread.submit(_lasting, like.device, count).result()
        _kept.setdefault(place, made)  # another thread's may be there by now, and its addresses in use
    return _kept[place].clone()


def _zero_hints(device: torch.device, count: int) -> torch.Tensor:
    """int64 [2, count, 2]: both with the addresses of the second, so that the first is not written, and lives as long."""
    hints = torch.zeros(2, count, 2, dtype=torch.int64, device=device)
    hints[:, :, 1] = torch.arange(count, device=device) * hints.stride(1) * hints.element_size() + hints[1].data_ptr()
    return hints


def _lasting(device: torch.device, count: int) -> torch.Tensor:
    """Zero hints, whose memory no earlier owner's work on any stream uses any more."""
    hints = _zero_hints(device, count)[1]
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return hints
