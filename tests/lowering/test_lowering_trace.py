"""Equal operations are traced once, and what is copied stands on its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.graphs.traced_graphs import BOTH, SHAPE, call, graph_of, te
from torch import fx

from te_dynamo.errors import LoweringError
from te_dynamo.lowering import trace
from te_dynamo.lowering.lower import lower
from te_dynamo.passes.dialect.graph import getitem_after
from te_dynamo.quantized.quantizers import Float8CurrentScalingQuantizer
from te_dynamo.testing import graph_text

pytestmark = pytest.mark.usefixtures("gpu")


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[fx.Node]:
    """The nodes that were traced."""
    nodes: list[fx.Node] = []
    original = trace._trace

    def noting(node: fx.Node, *args: Any) -> Any:
        nodes.append(node)
        return original(node, *args)

    monkeypatch.setattr(trace, "_trace", noting)
    return nodes


def test_equal_operations_are_traced_once(traced: list[fx.Node]) -> None:
    """On other tensors of the same shape; the graph is as if each had been traced."""
    graph = graph_of(*[(te.quantize, BOTH)] * 3, (te.activation, "gelu"))
    lower(graph)
    assert len(traced) == 2
    text = graph_text(graph)
    assert text.count("= triton.quantize_amax_kernel") == text.count("= triton.quantize_cast_kernel") == 3
    launches = [node for node in graph.nodes if "quantize_cast" in graph_text_of(node, graph)]
    assert len({node.kwargs["kwargs"]["x"] for node in launches}) == 3


def test_launches_that_overwrite_other_arguments_are_traced_apart(traced: list[fx.Node]) -> None:
    graph, results = fx.Graph(), list[fx.Node]()
    given = [graph.placeholder(name) for name in "abc"]
    for x in given:
        x.meta["val"] = torch.empty(*SHAPE, dtype=torch.bfloat16, device="cuda")
    for place in (0, 2):
        own = call(graph, te.activation.default, given[0], "gelu")
        node = call(graph, te.gated_backward.default, *given[:place], own, *given[place + 1 :], "silu")
        results += [getitem_after(node, index) for index in range(2)]
    graph.output(tuple(results))
    lower(graph)
    assert [node.target for node in traced].count(te.gated_backward.default) == 2


def graph_text_of(node: fx.Node, graph: fx.Graph) -> str:
    """The kernel that a node launches, "" for another node."""
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

    index = node.kwargs.get("kernel_idx")
    return "" if index is None else kernel_side_table.get_kernel(index).fn.__name__


def test_results_share_no_storage(traced: list[fx.Node]) -> None:
    """Inductor would take them for views of one buffer, and could write one over the other."""
    graph = graph_of(*[(te.quantize, BOTH)] * 2)
    expected = [[(v.shape, v.stride(), v.dtype) for v in node.meta["val"]] for node in quantizes(graph)]
    lower(graph)
    results = [result.meta["val"] for result in graph.output_node().args[0]]
    assert [(v.shape, v.stride(), v.dtype) for v in results] == [value for each in expected for value in each]
    assert len({value.untyped_storage()._cdata for value in results}) == len(results)
    assert len(traced) == 1


def quantizes(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.target is te.quantize.default]


@pytest.mark.parametrize(
    "second",
    [
        (te.quantize, BOTH.with_usage(columnwise=False)),
        (te.quantize, Float8CurrentScalingQuantizer(fp8_format="e5m2")),
        (te.quantize_bias_grad, BOTH),
    ],
    ids=["usage", "format", "operation"],
)
def test_other_operations_and_constants_have_their_own_trace(traced: list[fx.Node], second: tuple[Any, ...]) -> None:
    lower(graph_of((te.quantize, BOTH), second))
    assert len(traced) == 2


def test_other_dtypes_have_their_own_trace(traced: list[fx.Node]) -> None:
    lower(graph_of(*[(te.quantize, BOTH)] * 2, dtypes=(torch.bfloat16, torch.float32)))
    assert len(traced) == 2


def test_equal_numbers_of_other_types_have_their_own_trace(traced: list[fx.Node]) -> None:
    """True == 1 == 1.0 as a key, but not as an argument: here eps."""
    calls = [(te.rms_norm, None, eps, False, False) for eps in (1.0, 1)]
    lower(graph_of(*calls))
    assert len(traced) == 2


def test_a_launch_writes_in_place_and_nothing_else_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside an aten operation in place, which Inductor's passes do not expect, launches are functional too."""
    lower(graph := graph_of((te.activation, "gelu")))
    assert [str(n.target) for n in graph.nodes if "kernel_idx" in n.kwargs] == ["triton_kernel_wrapper_mutation"]
    kernel = trace.KERNELS[te.activation.default]
    monkeypatch.setitem(trace.KERNELS, te.activation.default, lambda x, kind: kernel(x, kind).add_(1))
    lower(graph := graph_of((te.activation, "gelu")))
    assert [str(n.target) for n in graph.nodes if "kernel_idx" in n.kwargs] == ["triton_kernel_wrapper_functional"]
    assert "aten.add(" in graph_text(graph) and "add_" not in graph_text(graph)


def test_a_failing_trace_names_the_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(x: torch.Tensor, quantizer: Any) -> Any:
        raise ValueError("no such tile")

    monkeypatch.setitem(trace.KERNELS, te.quantize.default, broken)
    with pytest.raises(LoweringError, match=r"te.quantize.default could not be lowered: no such tile"):
        lower(graph_of((te.quantize, BOTH)))


def test_what_the_graph_returns_twice_is_replaced_twice() -> None:
    """And a result that an operation reads as well, which is lowered later."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(*SHAPE, dtype=torch.bfloat16, device="cuda")
    first = call(graph, te.activation.default, x, "gelu")
    second = call(graph, te.activation.default, first, "relu")
    graph.output((first, second, first))
    lower(graph)
    a, b, c = graph.output_node().args[0]
    assert a is c and a is not b
    assert not any(node.target is te.activation.default for node in graph.nodes)
