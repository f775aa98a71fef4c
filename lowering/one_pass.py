"""Which quantizations of a graph guess their scales, and where their hints are: in a copy that the graph makes at its beginning.

    hints: i64[3, 2] = te.hints(x, "8c6a...", 3)
    slice: i64[2, 2] = aten.slice(hints, 0, 1, 3)      of the second and third scale

A node is left in two passes where the first one does more than to find an amax, or finds it for nothing: where Inductor's code, a product or a
norm has the tensor in hand, where columns are summed, where few values are one launch, and where the result takes its argument's memory.
A hint belongs to a node: the layers of a block that is compiled once share it.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

from te_dynamo.dialect.activation import activation_backward_quantize, activation_quantize
from te_dynamo.dialect.define import leaving
from te_dynamo.dialect.fakes import fake_mode_of
from te_dynamo.dialect.gated import gated_backward_quantize, gated_backward_quantize_halves, gated_quantize
from te_dynamo.dialect.memory import written_by_inductor
from te_dynamo.dialect.quantize import finds_amax, hints, quantize
from te_dynamo.dialect.stacked import quantize_stacked
from te_dynamo.kernels.runtime import availability
from te_dynamo.lowering.in_place import launches_in_place
from te_dynamo.quantized.quantizers import Quantizer

_SITES = (
    quantize,
    quantize_stacked,
    activation_quantize,
    activation_backward_quantize,
    gated_quantize,
    gated_backward_quantize,
    gated_backward_quantize_halves,
)


def give_hints(graph: Graph) -> dict[Node, Node]:
    """The hints of each node that guesses its scales, int64 [its scales, 2]: slices of a copy, which is put before the first of them.

    None in a package that leaves Python, where the hints are.
    """
    if leaving.get():
        return {}
    counts = {node: _scales(node) for node in graph.nodes if node.target in _SITES and _guesses(node)}
    if not counts:
        return {}
    first = next(iter(counts))
    name = hashlib.sha256(str(graph).encode()).hexdigest()[:16]
    copy = _call_before(first, hints, first.all_input_nodes[0], name, sum(counts.values()))
    given, begin = {}, 0
    for node, count in counts.items():
        given[node] = _call_before(node, torch.ops.aten.slice.Tensor, copy, 0, begin, begin + count)
        begin += count
    return given


def _call_before(node: Node, target: torch._ops.OpOverload, *args: Any) -> Node:
    with node.graph.inserting_before(node):
        call = node.graph.call_function(target, args)
    values = torch.fx.map_arg(args, lambda given: given.meta["val"])
    with fake_mode_of(values), disable_proxy_modes_tracing():
        call.meta["val"] = target(*values)
    return call


def _scales(node: Node) -> int:
    if node.target is quantize_stacked:
        return len(node.all_input_nodes)
    return 2 if node.target is gated_backward_quantize else 1


def _guesses(node: Node) -> bool:
    quantizer = next(argument for argument in node.args if isinstance(argument, Quantizer))
    assert isinstance(quantizer, Quantizer)  # for mypy: torch's Argument does not know it
    read: list[Any] = [x.meta["val"] for x in node.all_input_nodes]
    if not (quantizer.one_pass and availability.kernels_available(read[0].device).ok):
        return False
    if node.target in (quantize, quantize_stacked):
        return all(finds_amax(x, quantizer) for x in read) and not any(map(written_by_inductor, node.all_input_nodes))
    if node.target is activation_backward_quantize:
        return not node.args[5]
    if node.target is gated_quantize:
        return len(node.args) < 6 or node.args[5] is None
    return launches_in_place(node) is None
