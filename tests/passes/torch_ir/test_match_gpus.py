"""On a GPU without kernels a linear stays in 16 bits with the reason, and one that a rule names does not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from te_dynamo.kernels.runtime.target import TARGETS, Target, described
from te_dynamo.report import MatchRecord
from te_dynamo.testing import capture_on_fake_cuda

A100 = described("NVIDIA A100", (8, 0), 108, 163 * 1024)
FUTURE = described("NVIDIA X", (13, 0), 200, 227 * 1024)
REASON = "compute capability 8.0 has no FP8 tensor cores"


class Model(nn.Module):
    """A norm and two linears of sizes that pay in FP8."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(4096), nn.Linear(4096, 8192), nn.Linear(8192, 4096)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(self.norm(x))))


class Experts(nn.Module):
    """Two experts by F.grouped_mm."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2, 4096, 4096))

    def forward(self, x: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.grouped_mm(x, self.weight, offs=offs)


def on(gpu: Target, **options: Any) -> dict[str, MatchRecord]:
    """Module path -> record."""
    torch._dynamo.reset()
    graphs = capture_on_fake_cuda(
        lambda: Model().bfloat16(),
        lambda device: (torch.empty(8192, 4096, dtype=torch.bfloat16, device=device, requires_grad=True),),
        device=gpu,
        options={"codegen": "eager", **options},
    )
    return {record.module: record for report in graphs.reports for record in report.matches}


@pytest.mark.one_fast_case
@pytest.mark.parametrize(("gpu", "reason"), [(A100, REASON), (FUTURE, "this release of te_dynamo does not know")])
@pytest.mark.filterwarnings("ignore:te_dynamo")
def test_without_kernels(gpu: Target, reason: str) -> None:
    found = on(gpu)
    for path in ("up", "down"):
        assert not found[path].matched and found[path].reason.startswith(reason)
    assert not found["norm"].matched


@pytest.mark.filterwarnings("ignore:te_dynamo")
def test_a_rule_names_one() -> None:
    found = on(A100, rules=[("down", "float8_current_scaling")])
    assert found["down"].matched and not found["up"].matched and found["up"].reason == REASON


@pytest.mark.one_fast_case
@pytest.mark.parametrize("name", ["h200", "b200", "rtx5090", "l40s"])
def test_with_kernels(name: str) -> None:
    found = on(TARGETS[name])
    assert all(found[path].matched for path in ("norm", "up", "down"))


@pytest.mark.filterwarnings("ignore:te_dynamo")
def test_experts_without_kernels() -> None:
    torch._dynamo.reset()
    graphs = capture_on_fake_cuda(
        lambda: Experts().bfloat16(),
        lambda device: (
            torch.empty(16384, 4096, dtype=torch.bfloat16, device=device),
            torch.empty(2, dtype=torch.int32, device=device),
        ),
        backward=False,
        device=A100,
        options={"codegen": "eager"},
    )
    (record,) = [record for report in graphs.reports for record in report.matches]
    assert not record.matched and record.reason == REASON
