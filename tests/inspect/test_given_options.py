"""Which options `explain` and `compare` use: their own keywords, and what a compiled model was given; and what the results say of themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import te_dynamo
from te_dynamo import recipe as recipes
from te_dynamo.errors import InvalidOptionError
from te_dynamo.inspect.explain import Explanation

X = torch.ones(32, 32)
OPTIONS = {"recipe": "mxfp8", "codegen": "eager"}


class Net(nn.Sequential):
    """With code of its own: in place torch compiles no other."""

    def forward(self, x: Tensor) -> Tensor:
        return self[1](self[0](x))  # type: ignore[no-any-return]


def net() -> nn.Module:
    return Net(nn.Linear(32, 32), nn.Linear(32, 32))


def in_place() -> nn.Module:
    model = net()
    model.compile(backend="te", options=OPTIONS)
    return model


def function() -> Callable[..., Any]:
    model = net()
    return torch.compile(lambda x: model(x), backend="te", options=OPTIONS)


def wrapped() -> Callable[..., Any]:
    return torch.compile(net(), backend="te", options=OPTIONS)


def recipes_of(found: Explanation) -> list[str]:
    return [row.recipe for row in found.linears]


@pytest.mark.one_fast_case
@pytest.mark.parametrize("compiled", [in_place, function, wrapped])
def test_what_a_compiled_model_was_given(compiled: Callable[[], Any]) -> None:
    assert recipes_of(te_dynamo.explain(compiled(), X)) == ["mxfp8", "mxfp8"]
    assert recipes_of(te_dynamo.explain(compiled(), X, rules=[("", "nvfp4")])) == ["nvfp4", "nvfp4"]
    assert te_dynamo.compare(compiled(), X).recipe == "mxfp8"


@pytest.mark.one_fast_case
@pytest.mark.parametrize("device", [None, "h200"])
def test_keywords_as_compile_has_them(device: str | None) -> None:
    rules = [("1", None)]
    found = te_dynamo.explain(net(), X, recipe="mxfp8", rules=[("0", "nvfp4")], mode="reduce-overhead", device=device)
    assert recipes_of(found)[0] == "nvfp4"
    assert recipes_of(te_dynamo.explain(net(), X, recipe=None, device=device)) == ["", ""]
    assert te_dynamo.compare(net(), X, recipe="mxfp8", rules=rules).summary["linears"] == 1
    with pytest.raises(InvalidOptionError, match="unknown mode 'fast'"):
        te_dynamo.explain(net(), X, mode="fast", device=device)


def test_several_recipes_with_keywords_as_compile_has_them() -> None:
    names = ["mxfp8", "nvfp4"]
    found = te_dynamo.compare_recipes(net(), X, recipes=names, rules=[("1", None)], mode="reduce-overhead")
    assert {name: [row.module for row in each.rows] for name, each in found.comparisons.items()} == {
        "mxfp8": ["0"],
        "nvfp4": ["0"],
    }
    with pytest.raises(InvalidOptionError, match="unknown mode 'fast'"):
        te_dynamo.compare_recipes(net(), X, recipes=names, mode="fast")


def test_several_recipes_are_not_one() -> None:
    with pytest.raises(InvalidOptionError, match=r"compare_recipes: expected recipes=\[\.\.\.\], got recipe"):
        te_dynamo.compare_recipes(net(), X, options={"recipe": "mxfp8"})


@pytest.mark.parametrize(
    ("tool", "keyword", "near"),
    [
        (te_dynamo.explain, "recpie", "recipe"),
        (te_dynamo.compare, "optoins", "options"),
        (te_dynamo.compare_recipes, "recipe", "recipes"),
    ],
)
def test_a_misspelt_keyword_names_the_near_one(tool: Callable[..., Any], keyword: str, near: str) -> None:
    with pytest.raises(InvalidOptionError, match=f"unknown keyword '{keyword}'; did you mean '{near}'"):
        tool(net(), X, **{keyword: "mxfp8"})


def test_a_keyword_of_the_models_own_is_the_models() -> None:
    """Even where it is nearly one of ours; of a model that takes any it may be both, which is said."""

    def named(x: torch.Tensor, modes: int) -> torch.Tensor:
        return x * modes

    def takes_any(x: torch.Tensor, **kwargs: int) -> torch.Tensor:
        return x * kwargs["modes"]

    assert len(te_dynamo.explain(named, X, modes=2).reports) == 1
    with pytest.warns(UserWarning, match="did you mean 'mode'.*The model is called with 'modes'"):
        assert len(te_dynamo.explain(takes_any, X, modes=2).reports) == 1
    with pytest.raises(TypeError, match="unexpected keyword argument 'attention'"):
        te_dynamo.explain(named, X, modes=2, attention=1)


@pytest.mark.parametrize("name", ["fp8", "float8", "tensorwise"])
def test_other_libraries_names_of_current_scaling(name: str) -> None:
    assert recipes.by_name(name) == recipes.Float8CurrentScaling()
    assert name not in recipes.names()


def test_code_is_made_on_request() -> None:
    assert te_dynamo.explain(net(), X).to_dict()["lowered"] == []


@pytest.mark.slow
def test_code_that_was_asked_for() -> None:
    assert te_dynamo.explain(net(), X, options={"codegen": "inductor"}).to_dict()["lowered"]


def test_what_results_say_of_themselves() -> None:
    explained = te_dynamo.explain(net(), X, rules=[("0", None)])
    compared = te_dynamo.compare(net(), X)
    both = te_dynamo.compare_recipes(net(), X, recipes=["mxfp8", "nvfp4"])
    assert repr(explained) == f"<Explanation: {explained.headline}>"
    assert repr(compared).startswith("<Comparison: float8_current_scaling: 2 of 2 linears")
    assert repr(both) == "<RecipesCompared: mxfp8, nvfp4; the most accurate is mxfp8>"
