"""te_dynamo.set_recipe: another recipe from a step on; each is compiled once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import te_dynamo
from te_dynamo.errors import CoverageError, InputError, InvalidOptionError, KeptWeightError
from te_dynamo.inspect.target import unwrap

X = torch.linspace(-1, 1, 32 * 32).view(32, 32)
EAGER = {"codegen": "eager"}


class Part(nn.Linear):
    """nn.Linear's own forward Dynamo does not compile by itself."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class Net(nn.Module):
    def __init__(self, checkpoints: bool = False, breaks: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        self.checkpoints, self.breaks = checkpoints, breaks

    def both(self, x: Tensor) -> Tensor:
        x = self.up(x)
        if self.breaks:
            torch._dynamo.graph_break()
        return self.down(x)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.both, x, use_reentrant=False) if self.checkpoints else self.both(x)


def wrapped(model: nn.Module, **options: Any) -> Any:
    return torch.compile(model, backend="te", options={**EAGER, **options})


def in_place(model: nn.Module, **options: Any) -> Any:
    model.compile(backend="te", options={**EAGER, **options})
    return model


def by_keywords(model: nn.Module, **options: Any) -> Any:
    return te_dynamo.compile(model, codegen="eager", fullgraph=True, **options)


def function(model: nn.Module, **options: Any) -> Any:
    return torch.compile(lambda x: model(x), backend="te", options={**EAGER, **options})


def held_function(model: nn.Module, **options: Any) -> Any:
    return te_dynamo.compile(lambda x: model(x), codegen="eager", require_coverage=0.1, **options)


def in_parts(model: nn.Module, **options: Any) -> Any:
    model.up.__class__ = model.down.__class__ = Part
    model.up.compile(backend="te", options={**EAGER, **options})
    model.down = torch.compile(model.down, backend="te", options={**EAGER, **options})
    return model


def step(compiled: Callable[..., Any], model: nn.Module) -> list[Tensor]:
    """The output and the gradients."""
    model.zero_grad()
    y = compiled(X)
    y.square().sum().backward()
    return [y.detach(), *(parameter.grad for parameter in model.parameters())]


def expected(recipe: str | None, **options: Any) -> list[Tensor]:
    model = Net()
    return step(wrapped(model, recipe=recipe, **options), model)


def equal(found: list[Tensor], wanted: list[Tensor]) -> bool:
    return all(map(torch.equal, found, wanted))


@pytest.mark.one_fast_case
@pytest.mark.parametrize("compile_it", [wrapped, in_place, by_keywords, function, held_function, in_parts])
def test_each_recipe_is_compiled_once(compile_it: Callable[..., Any]) -> None:
    wanted = {name: expected(name) for name in ("float8_current_scaling", "mxfp8")}
    torch._dynamo.reset()  # code of an equal backend would be found
    model = Net()
    compiled = compile_it(model)
    with te_dynamo.capture() as graphs:
        counts = []
        for recipe in ("float8_current_scaling", "mxfp8", "float8_current_scaling", "mxfp8"):
            te_dynamo.set_recipe(compiled, recipe)
            assert equal(step(compiled, model), wanted[recipe]), recipe
            counts.append(len(graphs.reports))
    once = 2 if compile_it is in_parts else 1
    assert counts == [once, 2 * once, 2 * once, 2 * once]


def test_back_in_what_was_not_named() -> None:
    model = Net()
    compiled = wrapped(model)
    first = step(compiled, model)
    te_dynamo.set_recipe(compiled, None)
    assert not equal(step(compiled, model), first)
    te_dynamo.set_recipe(compiled, "float8_current_scaling")
    with te_dynamo.capture() as graphs:
        assert equal(step(compiled, model), first)
    assert graphs.reports == []


def test_what_is_not_given_stays() -> None:
    compiled = torch.compile(Net(), backend="te", mode="reduce-overhead")
    te_dynamo.set_recipe(compiled, "mxfp8", rules=[("down", None)])
    te_dynamo.set_recipe(compiled, rules=[("up", None)])
    options = unwrap(compiled)[1]["options"]
    assert options == {"triton.cudagraphs": True, "recipe": "mxfp8", "rules": [("up", None)]}
    found = te_dynamo.explain(compiled, X)
    assert {row.module: row.recipe for row in found.linears} == {"up": "", "down": "mxfp8"}


def test_a_backward_after_it_is_of_its_own_forward() -> None:
    model = Net()
    compiled = wrapped(model)
    y = compiled(X)
    te_dynamo.set_recipe(compiled, None)
    y.square().sum().backward()
    assert equal([p.grad for p in model.parameters()], expected("float8_current_scaling")[1:])
    assert equal(step(compiled, model), expected(None))


@pytest.mark.one_fast_case
@pytest.mark.parametrize(
    ("net", "options"),
    [({}, {"weight_cache": "step"}), ({"checkpoints": True}, {}), ({"breaks": True}, {"weight_cache": "step"})],
    ids=str,
)
def test_right_after_it(net: dict[str, bool], options: dict[str, Any]) -> None:
    """Steps of an optimizer in between: a kept weight is never another step's. The slow ones find it in a checkpoint, and behind a break."""
    found = {}
    for switches in (True, False):
        model = Net(**net)
        compiled, results = wrapped(model, **options), []
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        for recipe in ("float8_current_scaling", "mxfp8", None, "float8_current_scaling", "mxfp8"):
            if switches:
                te_dynamo.set_recipe(compiled, recipe)
            else:
                compiled = wrapped(model, recipe=recipe, **options)
            results += step(compiled, model)
            optimizer.step()
        found[switches] = results
    assert equal(found[True], found[False])


@pytest.mark.parametrize("drop_weights", [False, True])
@torch.no_grad()
def test_frozen_weights(drop_weights: bool) -> None:
    compiled = wrapped(te_dynamo.freeze(Net(), drop_weights=drop_weights))
    first = compiled(X)
    for recipe in ("mxfp8", None):
        te_dynamo.set_recipe(compiled, recipe)
        if drop_weights:
            with pytest.raises(Exception, match=r"values of 'up\.weight' were dropped") as error:
                compiled(X)
            assert isinstance(getattr(error.value, "inner_exception", error.value), KeptWeightError)
        else:
            assert torch.equal(compiled(X), wrapped(Net(), recipe=recipe)(X)), recipe
    te_dynamo.set_recipe(compiled, "float8_current_scaling")
    assert torch.equal(compiled(X), first)


def test_what_was_required_is_required() -> None:
    compiled = te_dynamo.compile(Net(), codegen="eager", require_coverage=0.9)
    te_dynamo.set_recipe(compiled, None)
    with pytest.raises(Exception, match="require_coverage asks for 90") as error:
        compiled(X)
    assert isinstance(getattr(error.value, "inner_exception", error.value), CoverageError)


@pytest.mark.parametrize(
    ("compiled", "what"),
    [
        (Net(), "got Net, not compiled"),
        (torch.sin, "got builtin_function_or_method, not compiled"),
        (torch.compile(Net(), backend="eager"), "got OptimizedModule, compiled by backend eager"),
        (torch.compile(lambda x: x), "got function, compiled by backend inductor"),
    ],
)
def test_what_te_has_not_compiled(compiled: Any, what: str) -> None:
    with pytest.raises(InputError, match=what):
        te_dynamo.set_recipe(compiled, "mxfp8")


@pytest.mark.parametrize("wrong", [{"recipe": "mxfp9"}, {"rules": [("layers.{last}", None)]}])
def test_a_mistake_changes_nothing(wrong: dict[str, Any]) -> None:
    model = Net()
    compiled = wrapped(model, recipe="mxfp8")
    with pytest.raises(InvalidOptionError):
        te_dynamo.set_recipe(compiled, **wrong)
    assert unwrap(compiled)[1]["options"] == {**EAGER, "recipe": "mxfp8"}


@pytest.mark.slow
@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_generated_code(mode: str | None) -> None:
    results = []
    for recipe in ("float8_current_scaling", "mxfp8"):
        model = Net()
        results.append(step(te_dynamo.compile(model, recipe=recipe, mode=mode), model))
    model = Net()
    compiled = te_dynamo.compile(model, mode=mode)
    for recipe, wanted in zip(
        ("float8_current_scaling", "mxfp8", "float8_current_scaling"), [*results, results[0]], strict=True
    ):
        te_dynamo.set_recipe(compiled, recipe)
        assert equal(step(compiled, model), wanted), recipe
