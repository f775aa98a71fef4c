"""One launch finds the amaxes of several tensors: which ones, where, and with the same bits."""

from __future__ import annotations

import operator
from collections.abc import Callable

import pytest
import torch
from expecttest import assert_expected_inline
from helpers.graphs.lowered_graphs import BOTH, ROWS, aten, call, inputs, te
from helpers.kernels.kernel_cases import assert_same_bits
from helpers.models.snapshot_models import kernels_everywhere
from torch import Tensor, fx

from te_dynamo.dialect import quantize
from te_dynamo.kernels.quantize.current import MOST_TENSORS
from te_dynamo.passes.dialect.shared_amaxes import share_amaxes
from te_dynamo.quantized.quantizers import MXFP8Quantizer
from te_dynamo.testing import graph_text


def tensors(count: int, rows: int = 128, columns: int = 64) -> list[Tensor]:
    return [torch.randn(rows, columns, dtype=torch.bfloat16) * 9**i for i in range(count)]


def graph_of(values: list[Tensor], make: Callable[[fx.Graph, list[fx.Node]], list[fx.Node]]) -> fx.Graph:
    """The graph that returns all results of the nodes that `make` makes of its inputs."""
    graph = fx.Graph()
    made = make(graph, inputs(graph, *values))
    read = [call(graph, operator.getitem, node, i) for node in made for i in range(len(node.meta["val"]))]
    graph.output(tuple(read))
    return graph


def shared(graph: fx.Graph) -> int:
    with kernels_everywhere():
        return share_amaxes(graph)


def test_weights_of_a_block_and_the_same_bits() -> None:
    """A stack and a tensor, with a product between them; and one that is read twice."""

    def make(graph: fx.Graph, xs: list[fx.Node]) -> list[fx.Node]:
        stack = call(graph, te.quantize_stacked.default, xs[:2], BOTH, False)
        call(graph, aten.mm.default, xs[0], call(graph, aten.t.default, xs[1]))
        one = call(graph, te.quantize.default, xs[2], BOTH)
        return [stack, one, call(graph, te.quantize.default, xs[0], BOTH)]

    values = tensors(3)
    graph = graph_of(values, make)
    before = fx.Interpreter(torch.fx.GraphModule({}, graph)).run(*values)
    assert shared(graph) == 3
    assert_same_bits(fx.Interpreter(torch.fx.GraphModule({}, graph)).run(*values), before)
    assert_expected_inline(
        "\n".join(line for line in graph_text(graph).splitlines() if "= te." in line or "aten" in line),
        """\
amaxes: f32[3, 512] = te.amaxes([x0, x1, x2])
select: f32[512] = aten.select(amaxes, 0, 0)
select_1: f32[512] = aten.select(amaxes, 0, 1)
quantize_stacked_with_amaxes: (f8e4m3[256, 64], f8e4m3[64, 256], f32[2]) = te.quantize_stacked_with_amaxes([x0, x1], e4m3[row+column], by_columns=False, amaxes=[select, select_1])
t: bf16[64, 128] = aten.t(x1)
mm: bf16[128, 128] = aten.mm(x0, t)
select_2: f32[512] = aten.select(amaxes, 0, 2)
quantize_with_amax: (f8e4m3[128, 64], f8e4m3[64, 128], f32[1]) = te.quantize_with_amax(x2, e4m3[row+column], select_2)
select_3: f32[512] = aten.select(amaxes, 0, 0)
quantize_with_amax_1: (f8e4m3[128, 64], f8e4m3[64, 128], f32[1]) = te.quantize_with_amax(x0, e4m3[row+column], select_3)""",
    )
    assert shared(graph) == 0


def test_at_most_so_many_tensors_and_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    def launches(graph: fx.Graph) -> list[int]:
        shared(graph)
        return [len(node.args[0]) for node in graph.nodes if node.target is te.amaxes.default]

    def make(graph: fx.Graph, xs: list[fx.Node]) -> list[fx.Node]:
        return [call(graph, te.quantize.default, x, BOTH) for x in xs]

    values = tensors(MOST_TENSORS + 3)
    assert launches(graph_of(values, make)) == [MOST_TENSORS, 3]
    monkeypatch.setattr(quantize, "MOST_BYTES", 2 * values[0].nbytes)
    assert launches(graph_of(values[:5], make)) == [2, 2]


def test_gradients_that_are_made_before_the_first_is_quantized() -> None:
    """dq and dk, say; but no tensor that is made later, and none that Inductor writes."""

    def make(graph: fx.Graph, xs: list[fx.Node]) -> list[fx.Node]:
        early = [call(graph, aten.mm.default, x, xs[-1]) for x in xs[:2]]
        quantized = [call(graph, te.quantize.default, x, BOTH) for x in early]
        late = call(graph, aten.mm.default, xs[2], xs[-1])
        total = call(graph, aten.add.Tensor, xs[0], xs[1])
        return [*quantized, *(call(graph, te.quantize.default, x, BOTH) for x in (late, total))]

    graph = graph_of([*tensors(3), *tensors(1, 64)], make)
    assert shared(graph) == 2
    (found,) = graph.find_nodes(op="call_function", target=te.amaxes.default)
    assert [x.name for x in found.args[0]] == ["mm_default", "mm_default_1"]


@pytest.mark.parametrize("case", ["few values", "another format", "another dtype", "columns of a matrix", "no kernels"])
def test_what_is_left(case: str) -> None:
    values = tensors(2)
    quantizer = {"few values": ROWS, "another format": MXFP8Quantizer()}.get(case, BOTH)
    if case == "another dtype":
        values[1] = values[1].float()
    if case == "columns of a matrix":
        values[1] = torch.randn(128, 128, dtype=torch.bfloat16)[:, :64]
    graph = graph_of(values, lambda graph, xs: [call(graph, te.quantize.default, x, quantizer) for x in xs])
    assert (share_amaxes if case == "no kernels" else shared)(graph) == 0


def test_a_graph_with_collectives() -> None:
    def make(graph: fx.Graph, xs: list[fx.Node]) -> list[fx.Node]:
        waited = [call(graph, torch.ops._c10d_functional.wait_tensor.default, x) for x in xs]
        return [call(graph, te.quantize.default, x, BOTH) for x in waited]

    assert shared(graph_of(tensors(2), make)) == 0
