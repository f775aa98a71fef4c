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
    assert torch.equal(model(x), y) if x.is_cuda else torch.allclose(model(x), y, atol=1e-5)
    if x.is_cuda:
        torch.cuda.synchronize()
print("done", flush=True)
"""


def run_package(folder: Path, xs: list[torch.Tensor], ys: list[torch.Tensor]) -> int:
    """Its process's return code: 0, or what a signal left."""
    torch.save((xs, ys), folder / "xy.pt")
    command = [sys.executable, "-X", "faulthandler", "-c", RUN]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": ""})
    print(done.stdout, done.stderr[-3000:])
    assert done.returncode <= 0
    return done.returncode


@pytest.fixture
def model() -> nn.Module:
    return nn.Sequential(nn.Linear(1024, 2048), nn.GELU(), nn.Linear(2048, 1024)).to("cuda", torch.bfloat16).eval()


@pytest.fixture
def xs() -> list[torch.Tensor]:
    return [torch.randn(rows, 1024, dtype=torch.bfloat16, device="cuda") for rows in (256, 512)]


DYNAMIC = ({0: torch.export.Dim.DYNAMIC},)


@pytest.fixture(scope="module")
def torchs_own_runs(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Skips where a package with nothing of ours ends its process, one for the CPU: seen with torch 2.11's wheel and g++ 13.3."""
    folder, linear, x = tmp_path_factory.mktemp("torchs_own"), nn.Linear(64, 64).eval(), torch.randn(4, 64)
    with torch.no_grad():
        program = torch.export.export(linear, (x,))
        torch._inductor.aoti_compile_and_package(program, package_path=str(folder / "model.pt2"))
        if run_package(folder, [x], [linear(x)]) < 0:
            pytest.skip("torch's own package ends its process with a signal here")


@pytest.mark.parametrize("name", RECIPES)
def test_a_package_has_the_compiled_models_bits(
    name: str, model: nn.Module, xs: list[torch.Tensor], tmp_path: Path, torchs_own_runs: None
) -> None:
    chosen = {"recipe": RECIPES[name], "rules": [("", RECIPES[name])]}
    with torch.no_grad():
        # Code in C++ multiplies by the same kernels: those in Gluon may add up in another order.
        compiled = torch.compile(model, backend="te", dynamic=True, options={**chosen, "cpp_wrapper": True})
        ys = [compiled(x) for x in xs]
    path = tmp_path / "model.pt2"
    te_dynamo.export(model, (xs[0],), path=path, kernels="triton", dynamic_shapes=DYNAMIC, **chosen)
    assert run_package(tmp_path, xs, ys) == 0
