"""The names that calls of Gluon kernels have in a profile: the module's path, forward and backward.

The kernel is stood in for on the CPU, so that the code runs.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.kernels.gemms import arguments, gemm_reference
from helpers.models.snapshot_models import calls_to_gemms_everywhere
from torch import Tensor, nn

from te_dynamo.lowering.extern import gemm as extern_gemm
from te_dynamo.torch_private.tracing import named_in_profiles


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


@pytest.fixture
def kernels_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.select_algorithm import extern_kernels

    def te_gemm(a: Tensor, sa: Tensor, b: Tensor, sb: Tensor, *others: Tensor, **form: Any) -> None:
        *bias, addend = others if form.get("adds") else (*others, 0)
        out = form["out"]
        out.copy_(gemm_reference(a, sa, b, sb, *(bias or (None,)), out.dtype, form["fast"]) + addend)

    calls_to_gemms_everywhere(monkeypatch)
    monkeypatch.setattr(extern_kernels, "te_gemm", named_in_profiles(te_gemm))


@pytest.mark.slow
def test_a_profile_reads_like_the_model(kernels_on_the_cpu: None) -> None:
    model = nn.Sequential(Block(), Block()).bfloat16()
    compiled = torch.compile(model, backend="te")
    x = torch.randn(16, 32).bfloat16()
    with torch._inductor.config.patch(force_disable_caches=True):
        compiled(x).sum().backward()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        compiled(x).sum().backward()
    names = {event.key for event in profile.key_averages() if "te_gemm" in event.key}
    linears = [f"{block}.{linear}" for block in (0, 1) for linear in ("up", "down")]
    assert {name.split()[0] for name in names} == set(linears), names
    assert {name.split()[0] for name in names if name.endswith(" backward")} == set(linears), names


def test_while_no_profiler_runs_nothing_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    class Recorded(torch.profiler.record_function):
        def __init__(self, name: str) -> None:
            made.append(name)
            super().__init__(name)

    monkeypatch.setattr(torch.profiler, "record_function", Recorded)
    call = named_in_profiles(lambda x, out: (x, out))
    assert call(1, out=2, name="layers.0.up te_gemm") == (1, 2) and not made
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        call(1, out=2, name="layers.0.up te_gemm")
    assert made == ["layers.0.up te_gemm"]


def node(target: Any, along: str, **meta: Any) -> torch.fx.Node:
    segments = [1, 1] if along else None
    found = torch.fx.Graph().call_function(target, arguments(*4 * (None,), None, None, False, None, along, segments))
    found.meta.update(meta)
    return found


@pytest.mark.parametrize(
    ("along", "meta", "name"),
    [
        ("", {}, "te_gemm"),
        ("", {"nn_module_stack": {"a": ("L['self'].layers.0.up", nn.Linear)}}, "layers.0.up te_gemm"),
        ("N", {"nn_module_stack": {"a": ("L['self'].q", nn.Linear)}}, "q and others te_gemm"),
        ("", {"fwd_nn_module_stack": {"a": ("L['self']._modules['up']", nn.Linear)}}, "up te_gemm backward"),
    ],
)
def test_names(along: str, meta: dict[str, Any], name: str) -> None:
    of = extern_gemm.gemm
    assert extern_gemm._name_in_profiles(node(of, along, **meta), extern_gemm._EXTERNS[of]) == name
