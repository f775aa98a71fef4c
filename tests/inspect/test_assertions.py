"""The assert_* methods of an explanation, and assert_graph: what a team's tests are written with."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn

import te_dynamo
from te_dynamo.errors import CoverageError, GraphBreakError, InvalidOptionError
from te_dynamo.inspect.dynamo import GraphBreak
from te_dynamo.inspect.explain import Explanation
from te_dynamo.report import MatchRecord, Report
from te_dynamo.testing import assert_graph

RULE = "rule 'head' leaves it in the model's precision"
UP = MatchRecord("linear", "mlp.up", "model.py:7", shape=("8", "64", "32"), flops=2 * 8 * 64 * 32)
DOWN = MatchRecord("linear", "mlp.down", "model.py:8", shape=("8", "32", "64"), flops=2 * 8 * 64 * 32)
HEAD = MatchRecord("linear", "head", "model.py:9", False, RULE, shape=("8", "16", "32"), flops=2 * 8 * 16 * 32)
SMALL = MatchRecord("linear", "", "model.py:3", False, "N is 3", shape=("8", "3", "32"), flops=2 * 8 * 3 * 32)
BREAKS = [GraphBreak("model.py:5", "print"), GraphBreak("", "a generator")]


@pytest.fixture
def explanation() -> Explanation:
    return Explanation([Report([SMALL, UP, DOWN, HEAD])], BREAKS)


def test_what_holds_passes(explanation: Explanation) -> None:
    explanation.assert_quantized(r"mlp\.")
    explanation.assert_coverage(0.87)
    Explanation([Report([UP])], []).assert_quantized()
    Explanation([Report([UP])], []).assert_no_graph_breaks()


def test_linears_that_are_left_are_listed_with_their_reasons(explanation: Explanation) -> None:
    with pytest.raises(AssertionError) as raised:
        explanation.assert_quantized()
    assert raised.type is CoverageError
    assert_expected_inline(
        str(raised.value),
        """\
te_dynamo: 2 of the 4 linears that match '' are in no recipe. Left, the largest first:
    head (model.py:9), 8 x 16 x 32: rule 'head' leaves it in the model's precision
    (no module) (model.py:3), 8 x 3 x 32: N is 3""",
    )


def test_a_pattern_that_no_linear_matches_is_no_promise_kept(explanation: Explanation) -> None:
    with pytest.raises(
        CoverageError, match=r"no linear's module path matches 'mpl'; .*linears: \(no module\), mlp.up,"
    ):
        explanation.assert_quantized("mpl")
    for pattern, said in (("(", r"'\(' is not a regular expression"), (3, "takes a regular expression, got 3")):
        with pytest.raises(InvalidOptionError, match=said):
            explanation.assert_quantized(pattern)  # type: ignore[arg-type]


def test_too_little_coverage(explanation: Explanation) -> None:
    with pytest.raises(AssertionError) as raised:
        explanation.assert_coverage(0.95)
    assert_expected_inline(
        str(raised.value),
        """\
te_dynamo: 87.1% of the linear FLOPs are in a recipe, and 95.0% were asked for. Left, the largest first:
    head (model.py:9), 8 x 16 x 32: rule 'head' leaves it in the model's precision
    (no module) (model.py:3), 8 x 3 x 32: N is 3""",
    )


@pytest.mark.parametrize("least", [95, -1, float("nan"), "95%", None, True])
def test_an_asked_coverage_is_a_share(explanation: Explanation, least: Any) -> None:
    with pytest.raises(InvalidOptionError, match="assert_coverage takes a share from 0 to 1, got "):
        explanation.assert_coverage(least)


def test_graph_breaks(explanation: Explanation) -> None:
    with pytest.raises(AssertionError) as raised:
        explanation.assert_no_graph_breaks()
    assert raised.type is GraphBreakError
    assert_expected_inline(
        str(raised.value),
        """\
te_dynamo: no graph breaks were asked for, and there are 2:
    model.py:5: print
    (unknown line): a generator""",
    )


def test_a_model() -> None:
    found = te_dynamo.explain(nn.Linear(32, 32), torch.randn(8, 32), options={"codegen": "eager"})
    found.assert_quantized("")
    found.assert_coverage(1.0)
    found.assert_no_graph_breaks()


# ---- assert_graph


def test_assert_graph_takes_graphs_and_texts() -> None:
    graph = torch.fx.symbolic_trace(lambda x: torch.relu(x))
    for form in (graph, graph.graph, "x = input\nrelu = torch.relu(x)\nreturn relu"):
        assert_graph(
            form,
            """\
x = input
relu = torch.relu(x)
return relu""",
        )
    with pytest.raises(AssertionError, match=r"(?s)-nothing.*\+x = input.*EXPECTTEST_ACCEPT=1"):
        assert_graph(graph, "nothing")


@pytest.mark.slow
def test_expecttest_accept_writes_the_callers_literal(tmp_path: Path) -> None:
    file = tmp_path / "snapshot.py"
    source = 'from te_dynamo.testing import assert_graph\n\nassert_graph("a = input\\nreturn a", """""")\n'
    file.write_text(source)
    subprocess.run([sys.executable, str(file)], env={**os.environ, "EXPECTTEST_ACCEPT": "1"}, check=True, timeout=120)
    assert file.read_text() == source.replace('""""""', '"""\\\na = input\nreturn a"""')


def test_a_missing_expecttest_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "expecttest", None)
    with pytest.raises(ImportError, match="assert_graph needs the package expecttest: pip install expecttest"):
        assert_graph("", "")
