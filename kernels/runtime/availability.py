"""Whether our Triton kernels run on a device, and if not, why."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from te_dynamo.kernels.runtime._triton import INSTALLED

MINIMUM_CAPABILITY = (9, 0)
"""Hopper: the first architecture with the tensor-core instruction (wgmma) and the copy engine the GEMMs are written for."""


class Availability(NamedTuple):
    """ok, and the reason when not."""

    ok: bool
    reason: str = ""


@functools.cache
def kernels_available(device: torch.device) -> Availability:
    """Whether the FP8 kernels run on `device`; the reason is a clause that a message can end with."""
    if device.type != "cuda":
        return Availability(False, f"device {device.type} has no FP8 kernels")
    if not INSTALLED:
        return Availability(False, "Triton is not installed")
    if not torch.cuda.is_available():
        return Availability(False, "torch finds no CUDA driver or device")
    capability = torch.cuda.get_device_capability(device)
    if capability < MINIMUM_CAPABILITY:
        found, needed = ".".join(map(str, capability)), ".".join(map(str, MINIMUM_CAPABILITY))
        return Availability(False, f"compute capability {found} is below {needed}")
    return Availability(True)
