"""Rules that count blocks, in compiled models: however these are compiled, and behind graph breaks."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import te_dynamo
from te_dynamo.errors import InvalidOptionError

X = torch.ones(16, 32)


class Block(nn.Module):
    def __init__(self, breaks: bool) -> None:
        super().__init__()
        self.breaks, self.up, self.down = breaks, nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        if self.breaks:
            torch._dynamo.graph_break()
        return self.down(x)


class Model(nn.Module):
    """The names of a transformers model: model.layers.N, lm_head."""

    def __init__(self, breaks: bool = False, checkpoints: bool = False) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.layers = nn.ModuleList(Block(breaks) for _ in range(3))
        self.lm_head = nn.Linear(32, 32)
        self.checkpoints = checkpoints

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.model.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpoints else layer(x)
        return self.lm_head(x)


def left(found: te_dynamo.inspect.explain.Explanation) -> list[str]:
    return [row.module for row in found.linears if not row.matched]


LAST = ["model.layers.2.up", "model.layers.2.down"]


def in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="te", options={"rules": [("layers.{-15%:}.*", None)]})
    return model


def wrapped(model: nn.Module) -> Any:
    return torch.compile(model, backend="te", options={"rules": [("layers.{-15%:}.*", None)]})


@pytest.mark.one_fast_case
@pytest.mark.parametrize("compiled", [in_place, wrapped])
@pytest.mark.parametrize("model", [{}, {"breaks": True}, {"checkpoints": True}], ids=str)
def test_the_last_blocks_stay(compiled: Callable[[nn.Module], Any], model: dict[str, bool]) -> None:
    found = te_dynamo.explain(compiled(Model(**model)), X)
    rule = "rule 'layers.{-15%:}.*' leaves it in the model's precision"
    assert sorted(row.module for row in found.linears if row.reason == rule) == sorted(LAST)
    assert all(row.matched for row in found.linears if row.module.startswith("model.layers") and row.module not in LAST)
    assert found.to_dict()["notes"] == ["the rule 'layers.{-15%:}.*' takes model.layers.2 (1)"]


def test_the_first_rule_decides_and_a_recipe_is_chosen_by_place() -> None:
    rules = [("layers.{-1:}", None), ("layers.{:34%}.*", "mxfp8"), ("layers", "nvfp4")]
    found = te_dynamo.explain(nn.Sequential(Model()), X, rules=rules)
    recipes = {row.module: row.recipe for row in found.linears if row.module.endswith("up")}
    assert recipes == {
        "0.model.layers.0.up": "mxfp8",
        "0.model.layers.1.up": "mxfp8",
        "0.model.layers.2.up": "",
    }


def test_numbers_of_a_sequential() -> None:
    model = nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(32, 32), nn.ReLU())))
    assert left(te_dynamo.explain(model, X, rules=[("^{-50%:}$", None)])) == ["4"]
    assert te_dynamo.compare(model, X, rules=[("^{-50%:}$", None)]).summary["linears"] == 2


@pytest.mark.one_fast_case
@pytest.mark.parametrize(
    ("pattern", "hint"),
    [
        ("layer.{-15%:}.*", "; did you mean 'layers'?; its lists of modules: model.layers (3)"),
        ("lm_head.{0}", "; did you mean 'lm_head'?; its lists of modules: model.layers (3)"),
        (
            "layers.{3:}",
            "; did you mean 'layers' or 'model.layers' or 'model.layers.2'?; its lists of modules: model.layers (3)",
        ),
    ],
)
def test_a_rule_that_takes_nothing(pattern: str, hint: str) -> None:
    """The slow ones find a wrong hint where a place is of a module that is no list, or past a list's end."""
    with pytest.warns(UserWarning) as caught:
        wrapped_by = torch.compile(Model(), backend="te", options={"codegen": "eager", "rules": [(pattern, None)]})
        wrapped_by(X)
    texts = [str(each.message) for each in caught]
    assert f"te_dynamo: no module path of the model matches the rule {pattern!r}{hint}" in texts


def test_a_function_has_no_lists() -> None:
    model = Model()
    with (
        warnings.catch_warnings(),
        pytest.raises(Exception, match="counts a model's modules, and a function is comp") as error,
    ):
        torch.compile(lambda x: model(x), backend="te", options={"rules": [("layers.{0}", None)]})(X)
    assert isinstance(getattr(error.value, "inner_exception", None), InvalidOptionError)
