"""kernels/runtime/availability.py: which GPUs have kernels, and what is said of the others."""

from __future__ import annotations

import pytest
import torch

from te_dynamo.kernels.runtime.availability import kernels_available, why_no_kernels
from te_dynamo.kernels.runtime.target import TARGETS, acting_as, described


@pytest.mark.parametrize("name", TARGETS)
def test_every_gpu_of_the_table_has_kernels(name: str) -> None:
    assert why_no_kernels(TARGETS[name]) == ""


@pytest.mark.parametrize(
    ("capability", "kilobytes", "reason"),
    [
        ((11, 0), 227, ""),
        ((8, 0), 163, "compute capability 8.0 has no FP8 tensor cores"),
        ((8, 6), 99, "compute capability 8.6 has no FP8 tensor cores"),
        ((10, 1), 227, "this release of te_dynamo does not know compute capability 10.1"),
        ((12, 1), 99, "Triton multiplies FP8 in 16 bits on compute capability 12.1"),
        ((13, 0), 227, "this release of te_dynamo does not know compute capability 13.0"),
        ((8, 9), 48, "the GEMMs take 99 KB of shared memory, and some GPU lends a program 48"),
    ],
)
def test_other_gpus(capability: tuple[int, int], kilobytes: int, reason: str) -> None:
    assert why_no_kernels(described("some GPU", capability, 100, kilobytes * 1024)) == reason


def test_a_device_answers_for_what_it_is_taken_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    cuda = torch.device("cuda")
    with acting_as(TARGETS["l40s"]):
        assert kernels_available(cuda).ok
    with acting_as(described("NVIDIA A100", (8, 0), 108, 163 * 1024)):
        assert kernels_available(cuda) == (False, "compute capability 8.0 has no FP8 tensor cores")
    assert kernels_available(torch.device("cpu")).reason == "device cpu has no FP8 kernels"
