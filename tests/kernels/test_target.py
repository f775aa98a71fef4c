"""kernels/runtime/target.py: the table of GPUs, and GPUs that it lacks."""

from __future__ import annotations

import torch

from te_dynamo.kernels.runtime.target import TARGETS, acting_as, described, target_of


def test_a_gpu_of_the_table_is_told_by_its_name_and_size() -> None:
    assert described("NVIDIA H200", (9, 0), 132, 227 * 1024) is TARGETS["h200"]
    assert described("NVIDIA H100 80GB HBM3", (9, 0), 132, 227 * 1024) is TARGETS["h100"]
    assert described("NVIDIA GeForce RTX 4090", (8, 9), 128, 99 * 1024) is TARGETS["rtx4090"]


def test_a_gpu_that_the_table_lacks_has_the_rates_of_its_kind_by_multiprocessors() -> None:
    l4 = described("NVIDIA L4", (8, 9), 71, 99 * 1024)
    assert (l4.name, l4.capability, l4.multiprocessors) == ("NVIDIA L4", (8, 9), 71)
    assert l4.fp8_tflops == TARGETS["l40s"].fp8_tflops / 2 and l4.bandwidth == TARGETS["l40s"].bandwidth / 2
    assert described("NVIDIA H100 PCIe", (9, 0), 114, 227 * 1024).fp8_tflops == 1979 * 114 / 132


def test_of_an_unknown_generation_the_nearest_is_taken() -> None:
    assert described("NVIDIA A100", (8, 0), 108, 163 * 1024).bandwidth == TARGETS["l40s"].bandwidth * 108 / 142
    assert described("NVIDIA X", (13, 0), 170, 99 * 1024).bandwidth == TARGETS["rtx5090"].bandwidth


def test_acting_as_another() -> None:
    cuda = torch.device("cuda")
    with acting_as(TARGETS["l40s"]):
        assert target_of(cuda) is TARGETS["l40s"]
        with acting_as(TARGETS["b200"]):
            assert target_of(cuda).arch == "sm_100a"
        assert target_of(cuda).arch == "sm_89"
    assert torch.cuda.is_available() or target_of(cuda) is TARGETS["h200"]
