"""What runs beside the fusions: equal nodes become one (passes/dialect/cse.py), unread copies are not made (passes/dialect/usage.py)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from helpers.graphs.graph_builder import BOTH, COLUMNS, E5M2, ROWS, Builder, aten, te
from torch import fx

from te_dynamo.passes.dialect.cse import merge_common_subexpressions
from te_dynamo.passes.dialect.usage import drop_unread_usages
from te_dynamo.quantized.quantizers import Float8CurrentScalingQuantizer, NVFP4Quantizer
from te_dynamo.testing import fake_cuda, graph_text


@pytest.fixture(autouse=True)
def fake() -> Iterator[None]:
    with fake_cuda():
        yield


def quantizes(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.target is te.quantize.default]


# ---- equal nodes


def test_equal_quantizations_of_equal_views_become_one() -> None:
    """As for q, k and v behind a reshape each: the views merge first, then what reads them."""
    b = Builder((2, 8, 64))
    results = []
    for _ in range(3):
        view = b.call(aten.view.default, b.inputs[0], [16, 64])
        items = b.read(b.call(te.quantize.default, view, BOTH), 0, 1, 2)
        results += [b.call(aten.clone.default, item) for item in items]
    graph = b.returns(*results)
    assert merge_common_subexpressions(graph) == 2 * 5  # a view, a quantize and three results, twice
    assert_expected_inline(
        graph_text(graph),
        """\
x0: bf16[2, 8, 64] = input
view: bf16[16, 64] = aten.view(x0, [16, 64])
quantize: (f8e4m3[16, 64], f8e4m3[64, 16], f32[1]) = te.quantize(view, e4m3[row+column])
clone: f8e4m3[16, 64] = aten.clone(quantize[0])
clone_1: f8e4m3[64, 16] = aten.clone(quantize[1])
clone_2: f32[1] = aten.clone(quantize[2])
clone_3: f8e4m3[16, 64] = aten.clone(quantize[0])
clone_4: f8e4m3[64, 16] = aten.clone(quantize[1])
clone_5: f32[1] = aten.clone(quantize[2])
clone_6: f8e4m3[16, 64] = aten.clone(quantize[0])
clone_7: f8e4m3[64, 16] = aten.clone(quantize[1])
clone_8: f32[1] = aten.clone(quantize[2])
return clone, clone_1, clone_2, clone_3, clone_4, clone_5, clone_6, clone_7, clone_8""",
    )
    assert merge_common_subexpressions(graph) == 0


def test_stochastic_quantizations_merge_by_their_random_bits() -> None:
    stochastic = NVFP4Quantizer(stochastic_rounding=True)
    rows, columns = stochastic.with_usage(columnwise=False), stochastic.with_usage(rowwise=False)
    for same, left in ((True, 1), (False, 2)):
        b = Builder((16, 64))
        bits = [b.call(aten.randint.low, -9, 9, [2]) for _ in range(2)]
        first = b.call(te.quantize.default, b.inputs[0], rows, bits[0])
        second = b.call(te.quantize.default, b.inputs[0], columns, bits[0 if same else 1])
        graph = b.returns(*b.read(first, 0, 1, 2), *b.read(second, 0, 1, 2))
        merge_common_subexpressions(graph)
        assert [node.args[2] for node in quantizes(graph)] == bits[:left]


@pytest.mark.parametrize(("first", "second"), [(ROWS, COLUMNS), (COLUMNS, ROWS), (ROWS, BOTH), (BOTH, COLUMNS)])
def test_quantizations_with_other_usages_become_their_union(first: Any, second: Any) -> None:
    """One reads rows, one columns: one node makes both, and each reader gets the buffer it asked for."""
    b = Builder((16, 64))
    read = []
    for quantizer in (first, second):
        count = len(quantizer._describe_buffers((16, 64)))
        read.append(b.read(b.call(te.quantize.default, b.inputs[0], quantizer), *range(count)))
    shapes = [node.meta["val"].shape for nodes in read for node in nodes]
    graph = b.returns(*read[0], *read[1])
    merge_common_subexpressions(graph)
    (node,) = quantizes(graph)
    assert node.args[1] == BOTH
    returned = graph.find_nodes(op="output")[0].args[0]
    assert [item.meta["val"].shape for item in returned] == shapes
    names = list(BOTH._describe_buffers((16, 64)))
    found = [names[item.args[1]] for item in returned]
    assert found == [name for quantizer in (first, second) for name in quantizer._describe_buffers((16, 64))]


def test_results_that_are_equal_stay_apart() -> None:
    b = Builder((16, 64))
    (one,), (two,) = (b.read(b.call(te.quantize.default, b.inputs[0], BOTH), 0) for _ in range(2))
    graph = b.returns(one, b.call(aten.view.default, two, [32, 32]))
    assert merge_common_subexpressions(graph) == 0


def test_other_formats_and_other_tensors_stay_apart() -> None:
    b = Builder((16, 64), (16, 64))
    nodes = [
        b.call(te.quantize.default, x, quantizer)
        for x, quantizer in ((b.inputs[0], BOTH), (b.inputs[0], E5M2), (b.inputs[1], BOTH))
    ]
    graph = b.returns(*(b.read(node, 0)[0] for node in nodes))
    assert merge_common_subexpressions(graph) == 0
    assert len(quantizes(graph)) == 3


REGIONS: list[dict[str, Any]] = [
    {},
    {"ac_graph_id": 1, "recompute": "MUST_RECOMPUTE"},
    {"ac_graph_id": 2, "recompute": "MUST_RECOMPUTE"},
]


def test_usages_outside_of_a_checkpoint_do_not_unite_with_those_inside() -> None:
    """United, what a checkpoint wants recomputed would be kept, or what is outside would be recomputed."""
    b = Builder((16, 64))
    nodes = [
        b.call(te.quantize.default, b.inputs[0], quantizer, **region)
        for region, quantizer in zip(REGIONS, (BOTH, COLUMNS, ROWS), strict=True)
    ]
    graph = b.returns(*(b.read(node, 0)[0] for node in nodes))
    assert merge_common_subexpressions(graph) == 0
    assert [node.meta.get("ac_graph_id") for node in quantizes(graph)] == [None, 1, 2]


@pytest.mark.parametrize("order", [(0, 1), (1, 0), (1, 2)], ids=str)
@pytest.mark.parametrize("through", [None, torch.ops.aten.sin.default], ids=["of one tensor", "of equal tensors"])
def test_equal_nodes_merge_across_a_checkpoints_border_and_agree_on_recomputation(
    order: tuple[int, int], through: Any
) -> None:
    """As in AOTAutograd's own CSE, which keeps the tags of the second's items on a node that may have none."""
    b = Builder((16, 64))
    items = []
    for index, position in enumerate(order):
        region = REGIONS[position]
        x = b.call(through, b.inputs[0], **region) if through else b.inputs[0]
        (item,) = b.read(b.call(te.quantize.default, x, BOTH, **region), index)
        item.meta.update(region)
        items.append(item)
    graph = b.returns(*items)
    assert merge_common_subexpressions(graph) == 1
    (node,) = quantizes(graph)
    outside = 0 in order
    for each in (node, *node.users):
        assert each.meta.get("recompute") == (None if outside else "MUST_RECOMPUTE")
        assert ("ac_graph_id" in each.meta) != outside


def test_random_and_written_tensors_are_no_equals() -> None:
    b = Builder((16, 64))
    noise = [b.call(torch.ops.aten.rand_like.default, b.inputs[0]) for _ in range(2)]
    nodes = [b.call(te.quantize.default, x, BOTH) for x in noise]
    graph = b.returns(*(b.read(node, 0)[0] for node in nodes))
    assert merge_common_subexpressions(graph) == 0


def test_nodes_of_one_checkpoint_merge() -> None:
    b = Builder((16, 64))
    region = {"ac_graph_id": 1, "recompute": "MUST_RECOMPUTE"}
    nodes = [b.call(te.quantize.default, b.inputs[0], quantizer, **region) for quantizer in (ROWS, COLUMNS)]
    graph = b.returns(*(b.read(node, 0)[0] for node in nodes))
    merge_common_subexpressions(graph)
    (node,) = quantizes(graph)
    assert node.meta["ac_graph_id"] == 1 and node.meta["recompute"] == "MUST_RECOMPUTE"


# ---- unread copies

X, WEIGHT = (16, 64), (64,)
PRODUCERS: dict[str, tuple[Any, tuple[tuple[int, ...], ...], tuple[Any, ...], int]] = {
    # operation, shapes of its tensors, its other arguments before the quantizer, results before the buffers
    "quantize": (te.quantize, (X,), (), 0),
    "rms_norm": (te.rms_norm_quantize, (X, WEIGHT), (1e-5, False, False), 1),
    "layer_norm": (te.layer_norm_quantize, (X, WEIGHT, WEIGHT), (1e-5,), 2),
    "activation": (te.activation_quantize, (X,), ("gelu",), 0),
    "gated": (te.gated_quantize, (X, X), ("gelu",), 0),
}


@pytest.mark.parametrize("keep_output", [False, True])
@pytest.mark.parametrize(("read", "expected"), [((0, 2), ROWS), ((1, 2), COLUMNS), ((0, 1, 2), BOTH), ((2,), ROWS)])
@pytest.mark.parametrize("producer", PRODUCERS)
def test_unread_copies_are_not_made(producer: str, read: tuple[int, ...], expected: Any, keep_output: bool) -> None:
    """Buffers of both usages are data, transpose, scale_inv: the usage of the unread one goes, the rest keeps its readers."""
    operation, shapes, constants, before = PRODUCERS[producer]
    keep_output = keep_output and producer != "quantize"  # which returns nothing beside its buffers
    b = Builder(*shapes)
    last = () if producer == "quantize" else (keep_output,)
    node = b.call(operation.default, *b.inputs, *constants, BOTH, *last)
    kept = list(range(before + keep_output))
    results = b.read(node, *kept, *(len(kept) + index for index in read))
    values = [(result.meta["val"].shape, result.meta["val"].dtype) for result in results]
    graph = b.returns(*results)

    assert drop_unread_usages(graph) == (0 if expected == BOTH else 1)
    (narrowed,) = [node for node in graph.nodes if node.target is operation.default]
    assert next(a for a in narrowed.args if isinstance(a, Float8CurrentScalingQuantizer)) == expected
    returned = graph.find_nodes(op="output")[0].args[0]
    assert [(item.meta["val"].shape, item.meta["val"].dtype) for item in returned] == values
    for item in returned:  # each item is what its index means in the narrowed operation
        assert narrowed.meta["val"][item.args[1]] is item.meta["val"]
    assert drop_unread_usages(graph) == 0
    graph.lint()


def test_a_single_usage_stays() -> None:
    """Nothing of it may be read, and still a quantizer has one usage."""
    b = Builder(X)
    graph = b.returns(*b.read(b.call(te.quantize.default, b.inputs[0], ROWS), 1))
    assert drop_unread_usages(graph) == 0
    assert quantizes(graph)[0].args[1] == ROWS
