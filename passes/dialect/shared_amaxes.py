"""Tensors that are quantized with one scale each: the amaxes of several that are there at one place are found in one launch.

    before    q = te.quantize_stacked([gate, up], e4m3[row+column], False)
              ...
              w: (f8e4m3[N, K], f8e4m3[K, N], f32[1]) = te.quantize(down, e4m3[row+column])
    after     a: f32[3, 512] = te.amaxes([gate, up, down])
              q = te.quantize_stacked_with_amaxes([gate, up], e4m3[row+column], False, [a[0], a[1]])
              ...
              w: (f8e4m3[N, K], f8e4m3[K, N], f32[1]) = te.quantize_with_amax(down, e4m3[row+column], a[2])

The casts stay where they were, so that no codes are alive earlier: amaxes have a few bytes. A launch takes the CPU longer than small
weights take the GPU. A group has few bytes (`share_amaxes_launch`). Every bit is the same. Weights that are quantized to be kept have it
too: te_dynamo/weights/quantize_together.py.

These are left as they are:

- tensors that Inductor's code writes, which finds the amax too (lowering/trace.py), and of few values, which one launch quantizes;
- those whose scale is guessed: the launch that casts finds their amax (lowering/one_pass.py);
- graphs with collectives: a launch that reads several gathered tensors would wait for the last of them.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from te_dynamo.dialect.memory import written_by_inductor
from te_dynamo.dialect.quantize import amaxes, finds_amax, quantize, quantize_with_amax, share_amaxes_launch
from te_dynamo.dialect.stacked import quantize_stacked, quantize_stacked_with_amaxes
from te_dynamo.passes.dialect.graph import call_like, calls
from te_dynamo.passes.dialect.usage import quantizer_of


def share_amaxes(graph: Graph) -> int:
    """Rewrites a graph in place, right before it is lowered; returns how many quantizations have their amax from another launch."""
    if any("c10d" in str(node.target) for node in graph.nodes):
        return 0
    places = {node: place for place, node in enumerate(graph.nodes)}
    waiting = [node for node in calls(graph, quantize, quantize_stacked) if _finds_amaxes(node)]
    shared = 0
    while waiting:
        first, *waiting = waiting
        group, tensors = [first], list(first.all_input_nodes)
        for node in waiting:
            joined = list(dict.fromkeys([*tensors, *node.all_input_nodes]))
            fit = share_amaxes_launch([tensor.meta["val"] for tensor in joined])
            if fit and all(places[tensor] < places[first] for tensor in joined):
                group, tensors = [*group, node], joined
        if len(group) > 1:
            _share(graph, group, tensors)
            waiting = [node for node in waiting if node not in group]
            shared += len(group)
    return shared


def _finds_amaxes(node: Node) -> bool:
    """Whether the node is lowered to a launch that finds amaxes, and one that casts."""
    _, quantizer = quantizer_of(node)
    values = [tensor.meta["val"] for tensor in node.all_input_nodes]
    alone = all(value.is_contiguous() and finds_amax(value, quantizer) for value in values)
    written = any(map(written_by_inductor, node.all_input_nodes))
    return alone and not written and not quantizer.one_pass


def _share(graph: Graph, group: list[Node], tensors: list[Node]) -> None:
    found = call_like(graph, amaxes, (tensors,), group[0])
    for node in group:
        own = [
            call_like(graph, torch.ops.aten.select.int, (found, 0, tensors.index(tensor)), node)
            for tensor in node.all_input_nodes
        ]
        if node.target is quantize:
            cast = call_like(graph, quantize_with_amax, (*node.args[:2], own[0]), node)
        else:
            cast = call_like(graph, quantize_stacked_with_amaxes, (*node.args, own), node)
        node.replace_all_uses_with(cast)
        graph.erase_node(node)
