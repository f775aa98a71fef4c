"""Results in the memory of an argument: where the graph made that, and nothing reads it later or gets it."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.graphs.lowered_graphs import LINEAR, bf16, call, f8, f32, inputs
from helpers.kernels.gemms import arguments
from torch import fx

from te_dynamo.lowering.extern.gemm import is_extern
from te_dynamo.lowering.extern.in_place import can_write_into_addend
from te_dynamo.lowering.lower import lower
from te_dynamo.quantized.quantizers import Float8CurrentScalingQuantizer
from te_dynamo.testing import graph_text

te, aten = torch.ops.te, torch.ops.aten
BOTH = Float8CurrentScalingQuantizer()
ROWS = BOTH.with_usage(columnwise=False)

pytestmark = pytest.mark.usefixtures("gpu")


def product(graph: fx.Graph, a: fx.Node, s: fx.Node, b: fx.Node, addend: fx.Node | None = None) -> fx.Node:
    """te.gemm of a [M, K] and b [N, K]."""
    return call(graph, te.gemm.default, *arguments(a, s, b, s, None, torch.bfloat16, True, addend))


@pytest.mark.parametrize("read_later", [False, True])
@pytest.mark.parametrize("made_by", ["an input", "a GEMM", "a sum", "a view of a sum", "a part of an input"])
def test_a_sum_takes_its_addends_place(made_by: str, read_later: bool) -> None:
    """Of a tensor that the graph made and that nothing reads later."""
    graph = fx.Graph()
    a, s, b, x, y = inputs(graph, f8(19, 64), f32(1), f8(32, 64), bf16(19, 32), bf16(1, 19, 32))
    if made_by == "a GEMM":
        addend = product(graph, a, s, b)
    elif made_by == "a sum":
        addend = call(graph, aten.add.Tensor, x, x)
    elif made_by == "a view of a sum":
        addend = call(graph, aten.view.default, call(graph, aten.add.Tensor, y, y), [19, 32])
    elif made_by == "a part of an input":
        addend = call(graph, aten.select.int, y, 0, 0)
    else:
        addend = x
    total = product(graph, a, s, b, addend)
    graph.output((total, call(graph, aten.relu.default, addend)) if read_later else (total,))
    lower(graph)
    assert takes_its_place(graph) == (not read_later and "input" not in made_by)


@pytest.mark.parametrize("read_later", [False, True])
def test_a_sum_leaves_an_addend_of_which_a_part_is_read_later(read_later: bool) -> None:
    graph = fx.Graph()
    a, s, b = inputs(graph, f8(16, 64), f32(1), f8(32, 64))
    addend = product(graph, a, s, b)
    part = call(graph, operator.getitem, call(graph, aten.split.Tensor, addend, 8), 1)
    first = call(graph, aten.relu.default, part)
    total = product(graph, a, s, b, addend)
    graph.output((total, first, *([call(graph, aten.neg.default, part)] if read_later else [])))
    lower(graph)
    assert takes_its_place(graph) == (not read_later)


def takes_its_place(graph: fx.Graph) -> bool:
    """Whether the last GEMM of a lowered graph writes its addend."""
    launched = [line for line in graph_text(graph).splitlines() if "triton.gemm_kernel[" in line]
    written, added = (dict(re.findall(r"(\w+)=(\w+)", launched[-1]))[name] for name in ("c", "addend"))
    return written == added


def test_an_addend_that_no_descriptor_reads_is_copied() -> None:
    """A large product's too, whose kernel is called: it would read a misaligned address."""
    graph = fx.Graph()
    a, s, b, x = inputs(graph, f8(4096, 4096), f32(1), f8(4096, 4096), bf16(4096 * 4096 + 8))
    for first, kernel in ((8, "Gluon"), (1, "Triton")):
        part = call(graph, aten.slice.Tensor, x, 0, first, first + 4096 * 4096)
        addend = call(graph, aten.view.default, part, [4096, 4096])
        node = product(graph, a, s, b, addend)
        assert is_extern(node) == (kernel == "Gluon")
    graph.output((node,))
    lower(graph)
    assert "aten.clone(view" in graph_text(graph)


@pytest.mark.parametrize("made_by", ["a GEMM", "Inductor"])
def test_a_call_takes_the_place_of_what_has_a_buffer_for_certain(made_by: str) -> None:
    """Inductor may compute its own values where they are read."""
    graph = fx.Graph()
    a, s, b, x = inputs(graph, f8(4096, 4096), f32(1), f8(4096, 4096), bf16(4096, 4096))
    addend = product(graph, a, s, b) if made_by == "a GEMM" else call(graph, aten.relu.default, x)
    assert can_write_into_addend(product(graph, a, s, b, addend)) == (made_by == "a GEMM")


# ---- what the graph returns is kept, though lowering has replaced it


def of_a_gemm(graph: fx.Graph) -> fx.Node:
    """One that lowering replaces once."""
    return product(graph, *inputs(graph, f8(16, 64), f32(1), f8(32, 64)))


def of_a_linear(graph: fx.Graph) -> fx.Node:
    """One that lowering replaces twice: by a te.gemm, and that by a launch."""
    x, weight = inputs(graph, bf16(16, 64), bf16(32, 64))
    return call(graph, operator.getitem, call(graph, te.linear.default, x, weight, None, LINEAR), 0)


def of_a_norm(graph: fx.Graph) -> fx.Node:
    """A residual stream: of an operation's several results."""
    x, residual, weight = inputs(graph, bf16(16, 32), bf16(16, 32), bf16(32))
    normed = call(graph, te.add_rms_norm_quantize.default, x, residual, weight, 1e-5, False, False, ROWS, False)
    return call(graph, operator.getitem, normed, 0)


def of_a_sum(graph: fx.Graph) -> fx.Node:
    """One that is in its addend's place itself."""
    a, s, b = inputs(graph, f8(16, 64), f32(1), f8(32, 64))
    return product(graph, a, s, b, product(graph, a, s, b))


MAKERS = [of_a_gemm, of_a_linear, of_a_norm, of_a_sum]


@pytest.mark.parametrize("returned", ["nothing", "the addend", "a view of it", "what it is a view of"])
@pytest.mark.parametrize("make", MAKERS)
def test_a_sum_leaves_an_addend_that_is_returned(make: Callable[[fx.Graph], fx.Node], returned: str) -> None:
    """Else Inductor copies the addend first, and a sum in a buffer of its own is a pass over memory less."""
    graph = fx.Graph()
    a, s, b = inputs(graph, f8(16, 64), f32(1), f8(32, 64))
    made = make(graph)
    addend = made
    if returned == "what it is a view of":
        addend = call(graph, aten.view.default, call(graph, aten.view.default, made, [512]), [16, 32])
    also = {
        "nothing": lambda: [],
        "the addend": lambda: [addend, addend],
        "a view of it": lambda: [call(graph, aten.view.default, addend, [512])],
        "what it is a view of": lambda: [made],
    }[returned]()
    total = product(graph, a, s, b, addend)
    graph.output((total, *also))
    expected = [node.meta["val"].shape for node in graph.output_node().args[0]]
    lower(graph)
    assert takes_its_place(graph) == (returned == "nothing")
    assert [node.meta["val"].shape for node in graph.output_node().args[0]] == expected


@pytest.mark.parametrize("returned", [False, True])
@pytest.mark.parametrize("halves", [False, True])
def test_codes_of_gradients_leave_a_dy_that_is_returned(halves: bool, returned: bool) -> None:
    graph = fx.Graph()
    a, s, b, gate, up = inputs(graph, f8(16, 64), f32(1), f8(128, 64), bf16(16, 128), bf16(16, 128))
    dy = product(graph, a, s, b)
    target = te.gated_backward_quantize_halves if halves else te.gated_backward_quantize
    codes = call(graph, target.default, dy, gate, up, "gelu", ROWS, False, True)
    results = [call(graph, operator.getitem, codes, index) for index in range(len(codes.meta["val"]))]
    graph.output((*results, *([dy] if returned else [])))
    lower(graph)
    assert ("triton.gated_backward_rows_kernel" in graph_text(graph)) == (not returned)


def test_an_output_is_the_same_but_for_what_was_replaced() -> None:
    """Also constants, inputs and what is returned twice; a graph with nothing to lower stays as it is."""
    graph = fx.Graph()
    (x,) = inputs(graph, bf16(16, 32))
    y = call(graph, aten.relu.default, x)
    graph.output((x, None, y, 3, [y]))
    before, names = graph.output_node().args, [node.name for node in graph.nodes]
    lower(graph)
    assert graph.output_node().args == before and [node.name for node in graph.nodes] == names


def test_no_replacement_rewrites_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would cost as much as the graph returns nodes: thousands, of a deep model's forward."""
    replace, replaced = fx.Node.replace_all_uses_with, []

    def noting(node: fx.Node, *args: Any) -> Any:
        replaced.append(node)
        assert not any(user.op == "output" for user in node.users)
        return replace(node, *args)

    graph = fx.Graph()
    results = [of_a_gemm(graph), of_a_norm(graph)]
    graph.output(tuple(results))
    monkeypatch.setattr(fx.Node, "replace_all_uses_with", noting)
    lower(graph)
    assert set(replaced) == set(results)
