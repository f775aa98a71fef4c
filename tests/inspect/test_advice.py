"""Warnings, once a model, where it runs otherwise than was probably meant; require_coverage."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed

import te_dynamo
from te_dynamo.errors import CoverageError, InvalidOptionError
from te_dynamo.inspect import advice
from te_dynamo.options import Options
from te_dynamo.passes.torch_ir.match import cpu_bound

EAGER = {"codegen": "eager"}


def told(call: Callable[[], Any]) -> list[str]:
    """The warnings of this package's that are about the model."""
    torch._dynamo.reset()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    texts = [str(warning.message) for warning in caught]
    return [
        text.removeprefix("te_dynamo: ") for text in texts if text.startswith("te_dynamo: ") and "kernels" not in text
    ]


def run(model: Any, x: Tensor | None = None, **options: Any) -> list[str]:
    compiled = torch.compile(model, backend="te", options={**EAGER, **options})
    return told(lambda: compiled(torch.randn(16, 32) if x is None else x))


def mlp(width: int = 64) -> nn.Module:
    return nn.Sequential(nn.Linear(32, width), nn.GELU(), nn.Linear(width, 32))


def test_nothing_is_said_of_a_model_that_runs_as_meant() -> None:
    assert run(mlp(), rules=[(r"^2$", None)]) == []
    assert run(nn.Conv1d(16, 16, 3), recipe=None) == []
    assert run(torch.sin) == []


def test_no_linear_in_a_recipe() -> None:
    model = mlp(30)
    (text,) = run(model)
    assert text.startswith("no linear of the model is in a recipe: 1 x N = 30, K = 32: ")
    assert "; 1 x N = 32, K = 30: " in text and text.endswith(". te_dynamo.explain has a row for each")
    assert run(model) == [], "once a model"
    assert run(mlp(30)) == [text]
    assert run(mlp(30), recipe=None) == [], "as asked for"
    assert te_dynamo.explain(model, torch.randn(16, 32), options=EAGER).to_dict()["notes"] == [text]


def emulations(model: nn.Module, device: str, **options: Any) -> list[str]:
    found = te_dynamo.explain(model, torch.randn(256, 32), device=device, options={**EAGER, **options}).to_dict()
    end = " is emulated on H200, whose tensor cores do not multiply its operands: exact, and slower than bf16"
    return [note.removesuffix(end) for note in found["notes"] if "emulated" in note]


@pytest.mark.parametrize("device", ["h200", "b200"])
def test_a_recipe_that_a_gpu_emulates(device: str, tmp_path: Path) -> None:
    rules = [(r"^0$", "mxfp8"), (r"^2$", te_dynamo.recipe.MXFP8BlockScaling(scale_block=128)), ("nowhere", "nvfp4")]
    assert emulations(mlp(), device, rules=rules) == (["mxfp8"] if device == "h200" else [])
    own = nn.Sequential(
        te_dynamo.nn.Linear(32, 64, bias=False, recipe="mxfp8"),
        te_dynamo.Sequential(te_dynamo.ops.BasicLinear(64, 32), recipe="nvfp4"),
    )
    assert emulations(own, device, recipe=None) == (["mxfp8", "nvfp4"] if device == "h200" else [])
    te_dynamo.save_checkpoint(mlp(), tmp_path, "compressed-tensors", recipe="nvfp4")
    stored = te_dynamo.load_checkpoint(mlp(), tmp_path)
    text = "nvfp4(backward='high_precision', weight_block_dims=1)"
    assert emulations(stored, device) == ([text] if device == "h200" else [])


def test_no_linear_at_all() -> None:
    assert run(nn.Softmax(dim=-1)) == ["no linear was found in the model: it runs as with Inductor alone"]
    (text,) = run(nn.Conv1d(16, 16, 3))
    assert text.startswith("no linear of the model is in a recipe: 1 x a convolution; te_dynamo has linears in recipes")


class Broken(nn.Module):
    """Two graphs; in the first no linear is in a recipe."""

    def __init__(self, second: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 30), nn.Linear(32, second)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        torch._dynamo.graph_break()
        return y.sum() + self.second(x)


class Center(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(-1, keepdim=True)


class Skipped(nn.Module):
    """Dynamo gives its forward up, and compiles what that calls: a graph without a linear, then one with a linear."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.experts = Center(), nn.ModuleList(Broken(width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for expert in self.experts:
            x = expert(self.norm(x[torch.where(x[:, 0] > -9)[0]]))[:, :32]
        return x


def test_the_first_graph_behind_a_skipped_function_is_not_the_model() -> None:
    assert run(Skipped(64)) == []


def test_all_graphs_of_a_model_count() -> None:
    assert run(Broken(64)) == []
    (text,) = run(Broken(30))
    assert text.startswith("no linear of the model is in a recipe")


@pytest.mark.one_fast_case
@pytest.mark.parametrize(
    ("pattern", "hint"),
    [
        ("lm_haed", "; did you mean 'lm_head'?"),
        (r"^layers\.(0|1)\.upp$", "; did you mean 'layers.1.up' or 'layers.0.up'"),
        ("zzzz", ""),
    ],
)
def test_a_rule_that_no_module_path_matches(pattern: str, hint: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.ModuleDict({"up": nn.Linear(32, 32)}) for _ in range(2))
            self.lm_head = nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer["up"](x)
            return self.lm_head(x)

    model = Model()
    (text,) = run(model, rules=[(pattern, None), ("lm_head", None)])
    assert text.startswith(f"no module path of the model matches the rule {pattern!r}{hint}")
    (text,) = run(lambda x: model(x), rules=[(pattern, None), ("lm_head", None)])
    assert text.startswith(f"no module path of the model matches the rule {pattern!r}")


class Shared(nn.Module):
    """One linear at two paths, the second of them behind a graph break."""

    def __init__(self) -> None:
        super().__init__()
        self.a = self.b = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        torch._dynamo.graph_break()
        return self.b(x)


def test_a_rule_for_the_second_path_of_a_module_behind_a_break() -> None:
    assert run(Shared(), rules=[("^b$", None)]) == []
    (text,) = run(Shared(), rules=[("^bb$", None)])
    assert text.startswith("no module path of the model matches the rule '^bb$'; did you mean 'b'")


@pytest.mark.parametrize("package", ["torchao", "transformer_engine", "bitsandbytes", "transformers.integrations"])
def test_linears_that_another_package_quantizes(package: str) -> None:
    linear = type("Fp8Linear", (nn.Linear,), {"__module__": f"{package}.float8"})
    model = nn.Sequential(linear(32, 32), nn.Linear(32, 32), linear(32, 32))
    (text,) = run(model)
    assert text.startswith(f"linears of {package} are in the model (2, '0' first)")


@pytest.mark.cost_rule
def test_a_gather_in_fp8_that_takes_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_bound, "_cpu_bound_reason", lambda *_: ("the graph is CPU-bound", 2))
    (text,) = run(mlp(), rules=[("", "float8_current_scaling")])
    assert text == (
        "the graph is CPU-bound. 2 of its weights travel in FP8, and their linear layers run in FP8: without fp8_all_gather they would stay "
        "in 16 bits"
    )


def test_a_cache_that_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advice, "_told_of_functions", set())  # a function's warnings come once a process
    model, step = nn.Linear(32, 32), {"weight_cache": "step"}
    assert run(model, **step) == []
    weight = torch.randn(32, 32)  # no parameter
    (text,) = run(lambda x: torch.nn.functional.linear(x, weight), **step)
    assert text.startswith('weight_cache="step" keeps nothing of the 1 linears of this graph')


@pytest.mark.parametrize("codegen", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_require_coverage(codegen: str) -> None:
    model, x = mlp(), torch.randn(16, 32)
    run(model, require_coverage=1.0, codegen=codegen)
    run(model, require_coverage=0.5, rules=[("2", None)], codegen=codegen)
    with pytest.raises(
        BackendCompilerFailed, match=r"50\.0% of the linear FLOPs of this graph are in a recipe"
    ) as caught:
        run(model, x, require_coverage=0.9, rules=[("2", None)], codegen=codegen)
    assert isinstance(caught.value.inner_exception, CoverageError)
    row = str(caught.value).partition("the largest first:\n")[2].splitlines()[0]
    assert row == "    2, 16 x 32 x 64: rule '2' leaves it in the model's precision"
    run(torch.sin, require_coverage=1.0)


@pytest.mark.parametrize("value", [True, "0.9", 1.5, -0.1])
def test_a_required_coverage_is_a_share(value: Any) -> None:
    with pytest.raises(InvalidOptionError, match="option 'require_coverage' takes a share from 0 to 1, got "):
        Options.parse({"require_coverage": value})
