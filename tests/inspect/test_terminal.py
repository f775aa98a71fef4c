"""What `print` shows of an explanation, a comparison and doctor: it fits the terminal, and says what is equal once."""

from __future__ import annotations

import os
import re

import pytest
import torch
from expecttest import assert_expected_inline
from rich.text import Text
from torch import nn

import te_dynamo
from te_dynamo.command_line.doctor import Diagnosis, diagnose
from te_dynamo.inspect.explain import Explanation
from te_dynamo.inspect.page.data import overview_data
from te_dynamo.inspect.tables import FittedTable, text_of
from te_dynamo.report import MatchRecord, Report

WIDTHS = [40, 80]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Stack(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(Block() for _ in range(depth)), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def stack_for_h200(depth: int) -> Explanation:
    return te_dynamo.explain(Stack(depth), torch.randn(32, 64), options={"rules": [("down", None)]}, device="h200")


def lines_at(width: int, shown: object, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv("COLUMNS", str(width))
    return str(shown).splitlines()


def test_an_explanation_at_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert_expected_inline(
        str(stack_for_h200(3)),
        """\
on an NVIDIA H200, where it was not run: coverage 53.8% of linear FLOPs in
float8_current_scaling, 4 of 7 linears; they take an estimated 0.117 ms instead
of 0.0445 ms (0.38x); the rows are 100.0% of the model's matrix FLOPs; 1 graph,
0 graph breaks

modules

| module           | M x N x K     | runs                   |
|------------------|---------------|------------------------|
| layers           |               | 3 of 6                 |
|   0-2, alike (3) |               | 3 of 6                 |
|     relu         |               | te.relu                |
|     up           | 32 x 128 x 64 | float8_current_scaling |
|     down         | 32 x 64 x 128 | left (1)               |
|     norm         |               | te.layer_norm          |
| head             | 32 x 64 x 64  | float8_current_scaling |

A wider terminal also shows: dtype, source.

fusions

| phase    | fusion                            | count |
|----------|-----------------------------------|-------|
| forward  | fuse_gemm_bias                    | 4     |
| forward  | fuse_norm_quantize                | 3     |
| forward  | fuse_norm_add_quantize            | 2     |
| backward | fuse_activation_backward_quantize | 3     |
| backward | fuse_quantize_bias_grad           | 1     |

reasons

(1)  rule 'down' leaves it in the model's precision""",
    )


def test_the_depth_of_a_stack_adds_no_line(monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = (lines_at(80, stack_for_h200(depth), monkeypatch) for depth in (3, 5))
    assert len(few) == len(many) and max(map(len, many)) <= 80


def test_reasons_that_differ_in_their_numbers_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The numbers of a quoted name and of a line of code say which it is: those stay apart."""
    monkeypatch.setenv("COLUMNS", "80")
    reasons = [
        "N = 10, K = 64: padding N to 16 would add 60%, more than 1/16",
        "N = 100, K = 64: padding N to 112 would add 12%, more than 1/16",
        "rule 'layers.1' leaves it",
        "rule 'layers.2' leaves it",
        "the graph break in model.py:17",
        "the graph break in model.py:18",
    ]
    records = [
        MatchRecord("linear", f"{name}", matched=False, reason=reason)
        for name, reason in zip("abcdef", reasons, strict=True)
    ]
    found = Explanation([Report(records)], [])
    shown = [
        "N = 10-100, K = 64: padding N to 16-112 would add 12-60%, more than 1/16",
        *reasons[2:],
    ]
    assert [group["reason"] for group in overview_data(found)["reasons"]] == shown
    text = str(found)
    assert [line[5:] for line in text.partition("reasons\n\n")[2].splitlines()] == shown
    assert [re.search(rf"\| {name} .*left (\(\d\))", text)[1] for name in "abcdef"] == [
        f"({number})" for number in (1, 1, 2, 3, 4, 5)
    ]


def test_an_explanation_fits_40_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    assert max(map(len, lines_at(40, stack_for_h200(2), monkeypatch))) <= 40


def test_a_name_breaks_behind_a_dot_or_an_underscore(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [("  in_proj_weight", "float8_current_scaling"), ("0.up", "averylongword"), ("  a name of words", "")]
    monkeypatch.setenv("COLUMNS", "30")
    assert_expected_inline(
        text_of([FittedTable("", ("name", "runs"), rows)]),
        """\
| name        | runs         |
|-------------|--------------|
|   in_proj_  | float8_      |
| weight      | current_     |
|             | scaling      |
| 0.up        | averylongwor |
|             | d            |
|   a name of |              |
| words       |              |""",
    )


def test_a_dumb_terminal_has_its_width_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("FORCE_COLOR", "1")  # as CI sets it
    assert max(map(len, lines_at(40, stack_for_h200(2), monkeypatch))) <= 40
    assert "\x1b" not in str(diagnose())


def test_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_terminal(_: int) -> os.terminal_size:
        raise OSError

    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr("os.get_terminal_size", no_terminal)
    for shown in (str(stack_for_h200(1)), str(diagnose())):
        assert shown.isascii() and 80 < max(map(len, shown.splitlines())) <= 160


@pytest.mark.parametrize("width", WIDTHS)
def test_a_comparison_fits(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(32, 64)
    for found in (te_dynamo.compare(Stack(1), x), te_dynamo.compare_recipes(Stack(1), x, recipes=["mxfp8", "nvfp4"])):
        assert max(map(len, lines_at(width, found, monkeypatch))) <= width


@pytest.mark.parametrize("width", WIDTHS)
def test_doctor_fits(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert max(map(len, lines_at(width, diagnose(), monkeypatch))) <= width


def test_doctor_says_what_is_wrong_first_and_fits_a_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert len(str(diagnose()).splitlines()) <= 24
    rows = [
        (name, "for speed", "a second", "2.11", state)
        for name, state in (("a.kept", "active"), ("a.gone", "skipped: a.gone is gone"))
    ]
    broken = Diagnosis(privates=rows, problems=["Triton cannot be imported"])
    assert str(broken).startswith("PROBLEM: Triton cannot be imported")
    assert "a.gone" in str(broken) and "a.kept" not in str(broken)
    assert "a.kept" in broken.text(verbose=True)


def test_a_table_leaves_out_what_is_empty_and_what_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    table = FittedTable("", ("name", "nothing", "long"), [("a", "", "b" * 20), ("[red]", "", "")], optional=("long",))
    monkeypatch.setenv("COLUMNS", "40")
    assert_expected_inline(
        text_of([table]),
        """\
| name  | long                 |
|-------|----------------------|
| a     | bbbbbbbbbbbbbbbbbbbb |
| [red] |                      |""",
    )
    monkeypatch.setenv("COLUMNS", "20")
    assert_expected_inline(
        text_of([table, Text("end")]),
        """\
| name  |
|-------|
| a     |
| [red] |

A wider terminal
also shows: long.
end""",
    )
