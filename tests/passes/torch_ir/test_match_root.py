"""Paths and rules behind graph breaks: whose parameters a graph has, and which other modules run it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import te_dynamo


class Up(nn.Linear):
    """A linear whose own forward breaks the graph, as PEFT's DoRA has it."""

    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return super().forward(x)


class MLP(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.up, self.down = Up(64, width), nn.Linear(width, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


class Net(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.a, self.b = blocks

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))


def helped(layer: nn.Module, x: Tensor) -> Tensor:
    torch._dynamo.graph_break()
    return layer(x)


class Helped(nn.Module):
    """Linears of torch's own class that a function runs behind its break."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = helped(layer, x)
        return x


TOLD_APART = "one module or parameter at 'a' and 'b', behind graph breaks, and the rules treat these differently"


class Shared(nn.Module):
    """One linear at two paths, which behind a break of its own has one graph."""

    def __init__(self) -> None:
        super().__init__()
        self.a = self.b = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return helped(self.b, helped(self.a, x))


@pytest.mark.one_fast_case
@pytest.mark.parametrize("rule", ["^a$", "^b$"])
def test_a_module_at_two_paths_that_rules_tell_apart_is_left_with_the_reason(rule: str) -> None:
    (reason,) = set(rows(Shared(), (rule, "mxfp8")).values())
    assert reason == TOLD_APART
    assert set(rows(Shared(), ("^[ab]$", None)).values()) == {"rule '^[ab]$' leaves it in the model's precision"}


class Tied(nn.Module):
    """Two linears with one weight, as an embedding and a head may have; run: how a call runs one of them."""

    def __init__(self, run: Any, bias: bool) -> None:
        super().__init__()
        self.a, self.b, self.run = nn.Linear(64, 64, bias=bias), nn.Linear(64, 64, bias=bias), run
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self.b, self.run(self.a, x))


@pytest.mark.one_fast_case
@pytest.mark.parametrize("bias", [True, False])
def test_modules_that_share_a_parameter_have_a_rule_each(bias: bool) -> None:
    for left, other in ("ab", "ba"):
        found = rows(Tied(lambda layer, x: layer(x), bias), (f"^{left}$", None))
        assert found == {left: f"rule '^{left}$' leaves it in the model's precision", other: ""}
        (reason,) = set(rows(Tied(helped, bias), (f"^{left}$", None)).values())
        assert reason == TOLD_APART


def rows(model: nn.Module, *rules: tuple[str, Any]) -> dict[str, str]:
    """Path -> the reason why it is left, "" where it is in the recipe; what is said is what a call runs."""
    torch._dynamo.reset()
    x, options = torch.randn(16, 64), {"codegen": "eager", "rules": list(rules)}
    found = {row.module: row.reason.partition(";")[0] for row in te_dynamo.explain(model, x, options=options).linears}
    assert _products(torch.compile(model, backend="te", options=options), x) == list(found.values()).count("")
    return found


def _products(compiled: Any, x: Tensor) -> int:
    with torch.no_grad():
        compiled(x)
        with torch.profiler.profile() as profile:
            compiled(x)
    return sum(event.name == "te::gemm" for event in profile.events())


@pytest.mark.one_fast_case
@pytest.mark.parametrize(
    ("rule", "left"),
    [
        (r"^b\.down$", {"b.down"}),
        (r"^a\.down$", {"a.down"}),
        (r"^b\.", {"b.up", "b.down"}),
        (r"down$", {"a.down", "b.down"}),
    ],
)
def test_a_rule_for_one_of_two_modules_that_run_one_function(rule: str, left: set[str]) -> None:
    found = rows(Net(MLP(), MLP()), (rule, None))
    assert (
        set(found) == {"a.up", "a.down", "b.up", "b.down"}
        and {path for path, reason in found.items() if reason} == left
    )


def test_a_recipe_for_one_of_them() -> None:
    found = te_dynamo.explain(
        Net(MLP(), MLP()), torch.randn(16, 64), options={"codegen": "eager", "rules": [("b.down", "mxfp8")]}
    )
    assert {row.module: row.recipe for row in found.linears if row.module.endswith("down")} == {
        "a.down": "float8_current_scaling",
        "b.down": "mxfp8",
    }


def test_more_modules_than_dynamo_compiles_are_left() -> None:
    found = rows(Net(Net(Net(MLP(), MLP()), MLP()), Net(MLP(), MLP())), (r"^b\.b\.down$", None))
    reason = "5 modules run this graph, behind graph breaks, and the rules treat them differently"
    assert {path: reason for path in found if path.endswith("down")} == {path: r for path, r in found.items() if r}


def test_modules_of_other_sizes_have_graphs_of_their_own() -> None:
    """Dynamo guards on the shapes of parameters, so that a rule for one holds for it alone, however many there are."""
    sizes = [MLP(64 * i) for i in range(1, 6)]
    found = rows(Net(Net(Net(*sizes[:2]), sizes[2]), Net(*sizes[3:])), (r"^b\.b\.down$", None))
    assert {path for path, reason in found.items() if reason} == {"b.b.down"}


def test_linears_that_a_function_runs() -> None:
    found = rows(Helped(), (r"layers\.1", None))
    assert found["layers.0"] == "" and found["layers.1"].startswith("rule ")


def test_a_module_at_two_paths_has_the_rule_of_the_first() -> None:
    """Nothing tells the calls of one object apart."""
    shared = MLP()
    options = {"codegen": "eager", "rules": [(r"^a\.down$", None)]}
    found = te_dynamo.explain(Net(shared, shared), torch.randn(16, 64), options=options)
    assert {(row.module, row.matched) for row in found.linears} == {("a.up", True), ("a.down", False)}
