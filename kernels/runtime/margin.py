"""The multiprocessors that GEMMs run on: all, or all but a margin that is left to other kernels, such as NCCL's.

    with sm_margin(16):    what is chosen and launched inside is for a GPU with 16 multiprocessors fewer

A persistent GEMM launches programs for every one that it has, and keeps them until its last tile is done. A kernel that starts meanwhile
runs on what is left. Kernels that are not persistent make room by themselves, as their programs end.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator

import torch

from te_dynamo.kernels.runtime.target import Target, target_of

_margin: contextvars.ContextVar[int] = contextvars.ContextVar("te_dynamo_sm_margin", default=0)


@contextlib.contextmanager
def sm_margin(multiprocessors: int) -> Iterator[None]:
    """Inside, on this thread, GEMMs leave so many multiprocessors to other kernels: fewer than the GPU has."""
    token = _margin.set(multiprocessors)
    try:
        yield
    finally:
        _margin.reset(token)


def current_sm_margin() -> int:
    """How many are left here."""
    return _margin.get()


def gemm_target(device: torch.device) -> Target:
    """The device as GEMMs have it: without the margin's multiprocessors."""
    target, margin = target_of(device), _margin.get()
    return dataclasses.replace(target, multiprocessors=target.multiprocessors - margin) if margin else target


def gemm_multiprocessors(device: torch.device) -> int:
    """Those that a persistent GEMM launches programs for."""
    return gemm_target(device).multiprocessors
