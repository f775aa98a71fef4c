"""mode="max-autotune" on a GPU: products are timed, remembered, and right. The option "sm_margin" beside it."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator

import pytest
import torch
from helpers.kernels.gemm_operands import relative_error
from torch import Tensor, nn

import te_dynamo
from te_dynamo import remembered as memory
from te_dynamo.kernels.gemm.choose import TUNED, choose
from te_dynamo.kernels.runtime.target import target_of
from te_dynamo.lowering.tune import PRODUCTS, _use_remembered
from te_dynamo.remembered import remembered

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def nothing_timed(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    later_process()
    yield
    later_process()


def later_process() -> None:
    torch._dynamo.reset()
    TUNED.clear()
    choose.cache_clear()
    memory._read.cache_clear()
    _use_remembered.cache_clear()


def step(model: nn.Module, x: Tensor, **options: object) -> list[Tensor]:
    """Output and gradients of a model that is compiled anew."""
    torch._dynamo.reset()
    model.zero_grad()
    y = te_dynamo.compile(model, **options)(x)
    y.float().square().mean().backward()
    return [y.detach(), *(parameter.grad.clone() for parameter in model.parameters())]


@pytest.mark.parametrize("recipe", ["float8_current_scaling", "float8_block_scaling"])
def test_products_are_timed_and_remembered(recipe: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)).cuda().bfloat16()
    x = torch.randn(8192, 1024, device="cuda", dtype=torch.bfloat16)
    rules = [(".", recipe)]  # a rule of the user's: whatever the cost model says of the size
    want = step(model, x, rules=rules)
    got = step(model, x, rules=rules, mode="max-autotune-no-cudagraphs")
    for one, other in zip(got, want, strict=True):
        assert relative_error(one, other) < 2e-2
    timed = dict(TUNED)
    assert timed and len(remembered(PRODUCTS)) == len(timed)
    later_process()
    again = step(model, x, rules=rules)
    assert timed == TUNED
    assert torch.equal(again[0], got[0]), "the same choices, whatever the mode"


def test_a_margin_takes_programs_from_a_product(tmp_path: pathlib.Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4096, 4096, bias=False).cuda().bfloat16()
    x = torch.randn(8192, 4096, device="cuda", dtype=torch.bfloat16)
    grids, outputs = [], []
    for margin in (0, 16):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            outputs.append(step(model, x, sm_margin=margin)[0])
            torch.cuda.synchronize()
        profile.export_chrome_trace(str(tmp_path / "trace.json"))
        events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
        grids.append({e["args"]["grid"][0] for e in events if "gemm" in e["name"] and "grid" in e.get("args", {})})
    multiprocessors = target_of(x.device).multiprocessors
    assert all(programs % multiprocessors == 0 for programs in grids[0])
    assert all(programs % (multiprocessors - 16) == 0 for programs in grids[1])
    assert relative_error(*outputs) < 1e-3
