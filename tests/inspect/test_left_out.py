"""Code that runs in no graph: `explain`, `compare` and the assert_* methods say why, by what Dynamo counted, and what helps."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import te_dynamo
from te_dynamo._compat import torch_version
from te_dynamo.errors import CoverageError, GraphBreakError, InputError
from te_dynamo.inspect.explain import Explanation

OPTIONS = {"codegen": "eager"}


class Experts(nn.Module):
    """A mixture's experts in a loop, of tokens that data decides."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(32, 2), nn.ModuleList(nn.Linear(32, 32) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        top, out = self.gate(x).argmax(-1), torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            rows = torch.where(top == e)[0]
            out = out.index_add(0, rows, expert(x[rows]))
        return out


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0])


class Disabled(nn.Linear):
    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class Around(nn.Module):
    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    @torch.compiler.disable(recursive=False)
    def forward(self, x: Tensor) -> Tensor:
        return self.part(x)


class Helped(nn.Module):
    """Its linear is multiplied in a function that is disabled, no forward is."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return helper(self.fc, x.sin())


@torch.compiler.disable
def helper(fc: nn.Module, x: Tensor) -> Tensor:
    return fc(x)


class BreaksInTry(nn.Module):
    """A break with a message where Dynamo cannot go on."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = self.fc(x)
            torch._dynamo.graph_break(msg="asked for")
        return x


class Mixed(nn.Module):
    """Beside linears in the recipe that are far larger."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 1024), nn.Linear(1024, 32)
        self.part = kind(32, 32) if kind is Disabled else kind()

    def forward(self, x: Tensor) -> Tensor:
        return self.part(self.down(self.up(x)))


SHAPES = (
    "Dynamo skips all of Experts.forward: Operator `aten.nonzero.default`'s output shape depends on input Tensor data. Enable tracing of "
    "dynamic shape operators with `torch._dynamo.config.capture_dynamic_output_shape_ops = True`. torch.compile(..., fullgraph=True) traces "
    "it too; as F.grouped_mm a mixture's experts need neither"
)
RNN = "Dynamo leaves nn.LSTM as it is, and torch fails on its gradient on a CPU"
LEFT = "Dynamo left the code that runs it as it is: "
REASONS: dict[type[nn.Module], dict[str, str]] = {
    Experts: {"part.gate": SHAPES, "part.experts.0": SHAPES, "part.experts.1": SHAPES},
    Recurrent: {"part.rnn": RNN, "part.head": "Dynamo skips all of Recurrent.forward: Dynamo does not support RNN, GRU, or LSTM. Set "},
    Disabled: {"part": f"{LEFT}Disabled.forward is disabled for the compiler (torch.compiler.disable)"},
    Helped: {"part.fc": f"{LEFT[:-2]}, at the graph break in test_left_out.py:"},
    BreaksInTry: {"part.fc": "Dynamo skips all of BreaksInTry.forward: asked for"},
}  # fmt: skip


def explained(model: Any, x: Tensor, **given: Any) -> Explanation:
    torch.manual_seed(0)
    return te_dynamo.explain(model, x, options=OPTIONS, **given)


@pytest.mark.one_fast_case
@pytest.mark.parametrize("compiled_before", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", REASONS, ids=lambda kind: kind.__name__)
def test_each_linear_in_no_graph_has_the_reason(kind: type[nn.Module], compiled_before: bool) -> None:
    torch._dynamo.reset()
    model, x = Mixed(kind), torch.randn(16, 32)
    if compiled_before:
        torch.compile(model, backend="eager")(x)
    found = explained(model, x)
    assert [row.module for row in found.linears[:2]] == ["up", "down"] and found.coverage > 0.8
    reasons = {row.module: row.reason for row in found.linears[2:]}
    assert reasons.keys() == REASONS[kind].keys()
    assert all(reasons[path].startswith(reason) for path, reason in REASONS[kind].items()), reasons
    with pytest.raises(GraphBreakError, match=r"and there are [12]:"):
        found.assert_no_graph_breaks()
    with pytest.raises(CoverageError, match="are in no recipe"):
        found.assert_quantized()
    with pytest.raises(CoverageError):
        found.assert_coverage(1.0)


class TwoBreaks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break(msg="first")
        return helper(self.fc, x.sin())


@pytest.mark.parametrize("wrap", [checkpoint_wrapper, lambda m: torch.compile(m, backend="te", options=OPTIONS)])
def test_a_wrapped_module_is_one_row_by_its_own_path(wrap: Any) -> None:
    """Its rows in graphs have that path: under another one it was counted again, and left."""
    torch._dynamo.reset()
    model = nn.Sequential(wrap(nn.Sequential(nn.Linear(32, 32))), wrap(Disabled(32, 32)))
    rows = explained(model, torch.randn(16, 32)).linears
    assert [(row.module, row.matched) for row in rows] == [("0.0", True), ("1", False)]
    assert rows[1].reason == REASONS[Disabled]["part"]
    if wrap is checkpoint_wrapper:
        with pytest.raises(CoverageError, match="and 1 ran in no graph"):
            te_dynamo.compile(model, require_coverage=0.9, **OPTIONS)(torch.randn(16, 32))


@pytest.mark.parametrize("whole", [True, False])
def test_what_is_compiled_in_place_of_torchs_own_code_runs_as_it_is(whole: bool) -> None:
    """torch compiles no forward of its own, so nothing of this model."""
    torch._dynamo.reset()
    part, x = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32)), torch.randn(16, 32)
    model, plain = part if whole else Around(part), part(x)
    part.compile(backend="te", options=OPTIONS)
    assert torch.equal(model(x), plain)
    found = explained(model, x)
    reason = (
        "module.compile() compiles no code of torch's own, as Sequential.forward is; torch.compile(module) compiles it"
    )
    assert found.coverage == 0 and [row.reason for row in found.linears] == [reason] * 2
    with pytest.raises(InputError, match=f"no linear of the model is in a recipe: {re.escape(reason)}"):
        te_dynamo.compare(model, x)


def test_of_several_breaks_none_is_named() -> None:
    (row,) = explained(TwoBreaks(), torch.randn(16, 32)).linears
    assert row.reason == f"{LEFT[:-2]}, at one of 2 graph breaks; explain lists them"


class Pools(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.randn(1, 1, 4, 32))

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(self.queries, x, x)


def test_dynamo_is_not_blamed_for_what_is_in_a_graph() -> None:
    found = explained(Pools(), torch.randn(1, 1, 16, 32))
    (row,) = found.linears
    assert len(found.reports) == 1 and row.reason.startswith(
        "it is in a graph, in a product that te_dynamo has no match for"
    )


@pytest.mark.h200_too
def test_a_skipped_function_is_a_graph_break_with_its_line() -> None:
    found = explained(Experts(), torch.randn(16, 32))
    (stop,) = found.graph_breaks
    line = Experts.forward.__code__.co_firstlineno + 3
    assert stop.source == f"test_left_out.py:{line}" and stop.reason == SHAPES.replace("Experts.forward", "forward")
    assert "0 of 3 linears" in found.headline and "0 graphs, 1 graph break" in found.headline


def test_where_products_cannot_be_counted_coverage_is_not_known() -> None:
    found = explained(Mixed(Experts), torch.randn(16, 32), device="h200")
    assert [row.module for row in found.linears if row.reason == SHAPES] == [
        "part.gate",
        "part.experts.0",
        "part.experts.1",
    ]
    with pytest.raises(
        CoverageError,
        match=r"not known, .*3 linears that are left have no known size(.|\n)*    part\.gate: Dynamo skips",
    ):
        found.assert_coverage(0.0)


def test_what_helps_does() -> None:
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        found = explained(Experts(), torch.randn(16, 32))
    assert {row.module for row in found.linears if row.matched} >= {"experts.0", "experts.1"} and not found.graph_breaks


def compiled_too_often(model: Any) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", dynamic=False)
    for size in range(2, 12):
        compiled(torch.randn(size, 32))


def function(x: Tensor) -> Tensor:
    return LINEAR(x)


LINEAR = nn.Linear(32, 32)
LIMIT = (
    r"Dynamo has compiled {} 8 times, its limit, and runs it as it is for other inputs: call torch\._dynamo\.reset\(\)"
)


@pytest.mark.one_fast_case
@pytest.mark.parametrize(
    ("model", "name"),
    [
        (Helped(), r"Helped\.forward"),
        (nn.Sequential(nn.Linear(32, 32)), r"Sequential\.forward"),
        (function, "function"),
    ],
    ids=["module", "torch's own", "function"],
)
def test_dynamos_limit_is_said(model: Any, name: str) -> None:
    compiled_too_often(model)
    found = explained(model, x := torch.randn(16, 32))
    assert not found.reports
    with pytest.raises(CoverageError, match=LIMIT.format(name)):
        found.assert_quantized()
    with pytest.raises(GraphBreakError, match=f"(?s)one graph was asked for, and there is none:.*{LIMIT.format(name)}"):
        found.assert_no_graph_breaks()
    with pytest.raises(InputError, match=f"no linear of the model is in a recipe: {LIMIT.format(name)}"):
        te_dynamo.compare(model, x)
    torch._dynamo.reset()
    assert explained(function, x).coverage == 1.0


class Scaled(nn.Module):
    """What is behind its break is compiled for each scale."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.scale = nn.Linear(32, 32), 0.0

    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break(msg="asked for")
        return self.fc(x) * self.scale


def test_dynamos_limit_behind_a_break_is_said() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(model := Scaled(), backend="eager", dynamic=False)
    for scale in range(10):
        model.scale = float(scale)
        compiled(x := torch.randn(16, 32))
    line = Scaled.forward.__code__.co_firstlineno + 1
    (row,) = explained(model, x).linears
    assert row.reason.startswith(
        f"Dynamo has compiled the rest of Scaled.forward behind test_left_out.py:{line} 8 times, its limit, and runs it as it is"
    )
    torch._dynamo.reset()
    assert explained(model, x).coverage == 1.0


@pytest.mark.parametrize("kind", [Experts, Recurrent], ids=lambda kind: kind.__name__)
def test_compare_says_why_nothing_is_measured(kind: type[nn.Module]) -> None:
    if kind is Recurrent and torch_version() >= (2, 15):
        pytest.skip("torch breaks the graph at nn.LSTM there, and the head behind it is compiled")
    with pytest.raises(
        InputError, match=rf"no linear of the model is in a recipe: .*Dynamo skips all of {kind.__name__}\.forward: "
    ):
        te_dynamo.compare(kind(), torch.randn(16, 32))


def test_no_graph_at_all() -> None:
    with pytest.raises(
        GraphBreakError, match="one graph was asked for, and there is none:\n    nothing of it is compiled"
    ):
        Explanation([], []).assert_no_graph_breaks()
