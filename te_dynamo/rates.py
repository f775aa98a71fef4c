"""How fast a GPU is beside the H200 whose times passes/torch_ir/match/cost.py has: by its published figures, or as `calibrate` found it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from te_dynamo.kernels.runtime.target import LAUNCH_US, TARGETS, Target, target_of
from te_dynamo.remembered import remembered

KIND = "rates"
"""Under this name te_dynamo/remembered.py has what `python -m te_dynamo calibrate` found."""

QUANTIZED = ((8192, 4096), (8192, 14336))
"""The two sizes of bf16 tensors that `calibrate` quantizes, rowwise in current scaling."""

H200: dict[str, Any] = {
    "copy_tbps": 4.1,
    "bf16_tflops": 705,
    "fp8_tflops": 1220,
    "launch_us": LAUNCH_US,
    "cpu_step_us": 1400,
    "quantize_us": [49.6, 149],
}
"""What `calibrate` finds on an H200 of the kind that cost.py's times are of, at its power limit; cpu_step_us: on the fast host of cpu_bound.py,
where steps of GELU MLPs in bf16 were enqueued in 1.40 and 1.45 ms."""


@dataclasses.dataclass(frozen=True)
class Rates:
    """Rates are relative to an H200's, times to its times.

    target:   which GPU.
    reading:  rate at which a weight is read. quantizing: rate of a pass that quantizes.
    bf16, fp8: rates of large products.
    launch:   time of a launch on the GPU. cpu: time that the CPU takes for what it does.
    measured: whether `calibrate` found them on this GPU.
    """

    target: Target
    reading: float
    quantizing: float
    bf16: float
    fp8: float
    launch: float = 1.0
    cpu: float = 1.0
    measured: bool = False

    def __str__(self) -> str:
        if self.measured:
            return "calibrated on this GPU"
        never = "" if self.target.measured else ", never measured"
        return f"estimated for an NVIDIA {self.target.name.removeprefix('NVIDIA ')}{never}"


def rates_of(device: torch.device) -> Rates:
    """As calibrated where that was done, else as published."""
    facts = remembered(KIND)
    return calibrated(target_of(device), facts) if facts else published(target_of(device))


def published(target: Target) -> Rates:
    h200 = TARGETS["h200"]
    bandwidth = target.bandwidth / h200.bandwidth
    return Rates(
        target, bandwidth, bandwidth, target.bf16_tflops / h200.bf16_tflops, target.fp8_tflops / h200.fp8_tflops
    )


def calibrated(target: Target, facts: Mapping[str, Any]) -> Rates:
    """facts: as `calibrate` remembers them, with the keys of `H200`."""

    def share(what: str) -> float:
        return float(facts[what]) / float(H200[what])

    slower = _slope(facts["quantize_us"]) / _slope(H200["quantize_us"])
    return Rates(
        target=target,
        reading=share("copy_tbps"),
        quantizing=1 / slower,
        bf16=share("bf16_tflops"),
        fp8=share("fp8_tflops"),
        launch=share("launch_us"),
        cpu=share("cpu_step_us"),
        measured=True,
    )


def _slope(us: list[float]) -> float:
    """us for a million elements more."""
    small, large = (rows * columns / 1e6 for rows, columns in QUANTIZED)
    return (us[1] - us[0]) / (large - small)
