"""Whether our Triton kernels run on a device, and if not, why."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from te_dynamo.kernels.runtime._triton import INSTALLED
from te_dynamo.kernels.runtime.target import TARGETS, Target, target_of

CAPABILITIES = {target.capability for target in TARGETS.values()} | {(11, 0)}
"""The compute capabilities that the kernels are compiled and tested for. Of others nothing is tried: for some of them the compiler
ends the process."""

LEAST_SHARED_BYTES = min(target.shared_bytes for target in TARGETS.values())
"""What a program has to get for some tile of every GEMM to fit."""


class Availability(NamedTuple):
    """ok, and the reason when not."""

    ok: bool
    reason: str = ""


def kernels_available(device: torch.device) -> Availability:
    """Whether the FP8 kernels run on `device`; the reason is a clause that a message can end with."""
    if device.type != "cuda":
        return Availability(False, f"device {device.type} has no FP8 kernels")
    if not INSTALLED:
        return Availability(False, "Triton is not installed")
    if not torch.cuda.is_available():
        return Availability(False, "torch finds no CUDA driver or device")
    reason = why_no_kernels(target_of(device))
    return Availability(not reason, reason)


@functools.cache
def why_no_kernels(target: Target) -> str:
    """Why the FP8 kernels do not run on a GPU, as a clause; "" where they do."""
    here = "compute capability {}.{}".format(*target.capability)
    if target.capability < min(CAPABILITIES):
        return f"{here} has no FP8 tensor cores"
    if target.capability == (12, 1):
        return f"Triton multiplies FP8 in 16 bits on {here}"
    if target.capability not in CAPABILITIES:
        return f"this release of te_dynamo does not know {here}"
    if target.shared_bytes < LEAST_SHARED_BYTES:
        least, lent = LEAST_SHARED_BYTES // 1024, target.shared_bytes // 1024
        return f"the GEMMs take {least} KB of shared memory, and {target.name} lends a program {lent}"
    return ""
