"""Kernels that start before what they read is written: programmatic dependent launch.

A launch begins some 0.75 us after its predecessor's end, as long as a kernel of a few rows takes to read a tenth of its weight.
A kernel that is launched early becomes resident while its predecessor still runs, and waits for the predecessor's end, of which
everything that the predecessor wrote is part. (Beginning to fetch the weight before that wait was tried on an H200: not faster.)

Every kernel of such a launch waits before it reads or writes anything; a launch of any other kernel begins after the end of all
before it. In Inductor's code an early launch is made by lowering/inductor/define_kernel.py.
"""

from __future__ import annotations

import torch

from te_dynamo.kernels.runtime._triton import tl, triton
from te_dynamo.kernels.runtime.target import target_of

FEW_ROWS = 64
"""The most rows whose kernels are short enough for the time between launches to count."""


def starts_early(rows: int | torch.SymInt, device: torch.device) -> bool:
    """Whether kernels that read or write [rows, ...] are launched early: few rows, a number known when compiling."""
    few = isinstance(rows, int) and rows <= FEW_ROWS
    return few and device.type == "cuda" and target_of(device).has_dependent_launch


@triton.jit
def wait_for_predecessor(EARLY: tl.constexpr):
    """The first thing that a kernel which may be launched EARLY does with memory; then its own successor may be launched."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
