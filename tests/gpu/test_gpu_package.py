"""A package of te_dynamo's Triton kernels gives the compiled model's bits in a process that cannot import te_dynamo."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.models.recipe_cases import RECIPES
from torch import nn

import te_dynamo

pytestmark = pytest.mark.gpu


RUN = """
import sys, torch
sys.modules["te_dynamo"] = None
xs, ys = torch.load("xy.pt")
print("loading", flush=True)
model = torch._inductor.aoti_load_package("model.pt2")
for x, y in zip(xs, ys):
    print("running", flush=True)
    assert torch.equal(model(x), y)
    torch.cuda.synchronize()
print("done", flush=True)
"""


def run_package(folder: Path, xs: list[torch.Tensor], ys: list[torch.Tensor]) -> None:
    torch.save((xs, ys), folder / "xy.pt")
    command = [sys.executable, "-X", "faulthandler", "-c", RUN]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": ""})
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]


@pytest.fixture
def model() -> nn.Module:
    return nn.Sequential(nn.Linear(1024, 2048), nn.GELU(), nn.Linear(2048, 1024)).to("cuda", torch.bfloat16).eval()


@pytest.fixture
def xs() -> list[torch.Tensor]:
    return [torch.randn(rows, 1024, dtype=torch.bfloat16, device="cuda") for rows in (256, 512)]


DYNAMIC = ({0: torch.export.Dim.DYNAMIC},)


def test_torchs_own_package_runs(model: nn.Module, xs: list[torch.Tensor], tmp_path: Path) -> None:
    """What the others are compared with: without it a failure of theirs may be torch's."""
    with torch.no_grad():
        program = torch.export.export(model, (xs[0],), dynamic_shapes=DYNAMIC)
        torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
        package = torch._inductor.aoti_load_package(str(tmp_path / "model.pt2"))
        run_package(tmp_path, xs, [package(x) for x in xs])


@pytest.mark.parametrize("name", RECIPES)
def test_a_package_has_the_compiled_models_bits(
    name: str, model: nn.Module, xs: list[torch.Tensor], tmp_path: Path
) -> None:
    chosen = {"recipe": RECIPES[name], "rules": [("", RECIPES[name])]}
    with torch.no_grad():
        # Code in C++ multiplies by the same kernels: those in Gluon may add up in another order.
        compiled = torch.compile(model, backend="te", dynamic=True, options={**chosen, "cpp_wrapper": True})
        ys = [compiled(x) for x in xs]
    path = tmp_path / "model.pt2"
    te_dynamo.export(model, (xs[0],), path=path, kernels="triton", dynamic_shapes=DYNAMIC, **chosen)
    run_package(tmp_path, xs, ys)
