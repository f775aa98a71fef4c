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


@pytest.mark.parametrize("rows", [32, 4096])
@pytest.mark.parametrize("name", RECIPES)
def test_a_package_has_the_compiled_models_bits(name: str, rows: int, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4096, 8192), nn.GELU(), nn.Linear(8192, 4096)).to("cuda", torch.bfloat16).eval()
    xs = [torch.randn(count, 4096, dtype=torch.bfloat16, device="cuda") for count in (rows, 2 * rows)]
    with torch.no_grad():
        # Code in C++ multiplies by the same kernels: those in Gluon may add up in another order.
        options = {"recipe": RECIPES[name], "cpp_wrapper": True}
        compiled = torch.compile(model, backend="te", dynamic=True, options=options)
        ys = [compiled(x) for x in xs]
    te_dynamo.export(
        model,
        (xs[0],),
        path=tmp_path / "model.pt2",
        kernels="triton",
        dynamic_shapes=({0: torch.export.Dim.DYNAMIC},),
        recipe=RECIPES[name],
    )
    torch.save((xs, ys), tmp_path / "xy.pt")
    run = (
        "import sys, torch; sys.modules['te_dynamo'] = None; xs, ys = torch.load('xy.pt'); "
        "m = torch._inductor.aoti_load_package('model.pt2'); assert [torch.equal(m(x), y) for x, y in zip(xs, ys)] == [True, True]"
    )
    subprocess.run([sys.executable, "-c", run], cwd=tmp_path, check=True, env=os.environ | {"PYTHONPATH": ""})
