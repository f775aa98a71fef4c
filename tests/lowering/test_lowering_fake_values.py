"""Values of what lowering puts into a graph are right, and torch does not compute them again."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers.graphs import lowered_graphs
from helpers.slow import slow_but
from torch import fx
from torch._inductor import fx_utils
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode

from te_dynamo.kernels.runtime._triton import INSTALLED
from te_dynamo.lowering.inductor.fake_values import _is_right
from te_dynamo.lowering.inductor.install import install
from te_dynamo.lowering.lower import lower
from te_dynamo.quantized.quantizers import Float8CurrentScalingQuantizer
from te_dynamo.torch_private.private import compiling_ours

pytestmark = pytest.mark.skipif(not INSTALLED, reason="launches need Triton")
te, aten = torch.ops.te, torch.ops.aten
Updated = Callable[[fx.Graph, Callable[[fx.Graph], Any]], list[Any]]


@pytest.fixture(autouse=True)
def ours(gpu: None) -> Iterator[None]:
    with compiling_ours():
        yield


def computed_again(node: fx.Node) -> Any:
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    return node.target(*args, **kwargs)  # type: ignore[operator]


def storage(value: Any) -> int:
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else 0


def described(node: fx.Node, value: Any) -> Any:
    """A value's layout, and of which inputs it is a view."""
    if not isinstance(value, torch.Tensor):
        return str(value)
    seen = [n.name for n in node.all_input_nodes if storage(n.meta["val"]) == storage(value)]
    return value.dtype, value.device, value.shape, value.stride(), value.storage_offset(), seen


@pytest.mark.parametrize(
    ("name", "times"),
    [*((name, 1) for name in lowered_graphs.CASES), *slow_but(22, [(name, 2) for name in lowered_graphs.CASES])],
)
def test_values_are_those_that_torch_would_compute(name: str, times: int) -> None:
    """Of the nodes that are traced, and of a copy's for a second operation on the same tensors: one function makes all copies, the slow ones find
    an operation whose graph it cannot copy."""
    target, arguments, _ = lowered_graphs.CASES[name]
    graph = lowered_graphs.graph_of(target.default, *arguments())
    if times == 2:
        (node,) = [n for n in graph.nodes if n.target is target.default]
        with graph.inserting_after(node):
            twin = graph.call_function(node.target, node.args, node.kwargs)
        twin.meta["val"] = computed_again(twin)
    lower(graph)
    lowered = [node for node in graph.nodes if _is_right(node)]
    for node in lowered:
        if isinstance(node.target, torch._ops.OpOverload):
            assert described(node, node.meta["val"]) == described(node, computed_again(node)), node.format_node()
    assert lowered or not {"Triton", "Inductor"} & {runs for _, runs in lower(graph)}


@pytest.fixture
def updated(monkeypatch: pytest.MonkeyPatch) -> Updated:
    """A function that gives the operations of which torch computes values after a change."""
    called: list[Any] = []
    dispatch = FakeTensorMode.dispatch

    def noting(self: Any, func: Any, *args: Any, **kwargs: Any) -> Any:
        called.append(func)
        return dispatch(self, func, *args, **kwargs)

    def update(graph: fx.Graph, change: Any) -> list[Any]:
        install()
        mode = next(n.meta["val"] for n in graph.nodes if n.op == "placeholder").fake_mode
        takes_module = "gm" in inspect.signature(fx_utils.FakeTensorUpdater).parameters
        updater = fx_utils.FakeTensorUpdater(fx.GraphModule({}, graph) if takes_module else graph)
        graph = updater.gm.graph if takes_module else graph
        change(graph)
        monkeypatch.setattr(FakeTensorMode, "dispatch", noting)
        with V.set_fake_mode(mode):
            updater.incremental_update()
        return called

    return update


def quantization() -> fx.Graph:
    return lowered_graphs.graph_of(te.quantize.default, lowered_graphs.bf16(1024, 128), Float8CurrentScalingQuantizer())


def test_lowered_nodes_are_not_computed_again(updated: Updated) -> None:
    assert updated(quantization(), lower) == []


def test_what_a_later_pass_changes_is_computed(updated: Updated) -> None:
    changed: list[fx.Node] = []

    def change(graph: fx.Graph) -> None:
        lower(graph)
        partials = next(n for n in graph.nodes if n.target is aten.empty.memory_format)
        partials.args = ([7], *partials.args[1:])
        changed.append(partials)

    assert updated(quantization(), change)[0] is aten.empty.memory_format
    assert changed[0].meta["val"].shape == (7,)


def test_another_target_makes_a_value_wrong() -> None:
    graph = quantization()
    lower(graph)
    node = next(n for n in graph.nodes if n.target is aten.empty.memory_format)
    assert _is_right(node)
    node.target = aten.zeros.default
    assert not _is_right(node)
