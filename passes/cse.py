"""Common subexpressions of the dialect: equal te operations, and the views they read, become one.

q, k and v each quantize the norm's output; gate and up too; a tied weight is quantized where it is used. Two quantizations
of one tensor that differ only in what they keep (rowwise, columnwise) become one that keeps both: no format's rowwise
buffers depend on whether there are columnwise ones.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, Node

from te_dynamo.ops.define import is_te
from te_dynamo.ops.quantize import quantize
from te_dynamo.passes.graph import RESHAPES, call_like, calls, replace_items
from te_dynamo.quantizers import Quantizer

__all__ = ["merge_common_subexpressions"]

_VIEWS = {*RESHAPES, torch.ops.aten.permute.default, torch.ops.aten.t.default}


def merge_common_subexpressions(graph: Graph) -> int:
    """Merges in place; returns how many nodes went away."""
    return _merge_usages(graph) + _merge_equal(graph)


def _merge_equal(graph: Graph) -> int:
    first: dict[Any, Node] = {}
    merged = 0
    for node in list(graph.nodes):
        if node.op != "call_function" or not (
            is_te(node.target) or node.target in _VIEWS or node.target is operator.getitem
        ):
            continue
        key = (node.target, node.args, tuple(sorted(node.kwargs.items())), _tag(node))
        try:
            original = first.setdefault(key, node)
        except TypeError:  # an unhashable argument
            continue
        if original is not node:
            node.replace_all_uses_with(original)
            graph.erase_node(node)
            merged += 1
    return merged


def _merge_usages(graph: Graph) -> int:
    groups: dict[Any, list[Node]] = {}
    for node in calls(graph, quantize):
        key = (node.args[0], _quantizer(node).with_usage(True, True), node.args[2:], _tag(node))
        groups.setdefault(key, []).append(node)
    merged = 0
    for (source, both, random, _), nodes in groups.items():
        if len({node.args[1] for node in nodes}) < 2:
            continue
        union = call_like(graph, quantize, (source, both, *random), nodes[0])
        position = {name: i for i, name in enumerate(both.buffer_names())}
        for node in nodes:
            names = _quantizer(node).buffer_names()
            replace_items(node, union, {i: position[name] for i, name in enumerate(names)})
            graph.erase_node(node)
        merged += len(nodes) - 1
    return merged


def _quantizer(node: Node) -> Quantizer:
    quantizer = node.args[1]
    assert isinstance(quantizer, Quantizer)
    return quantizer


def _tag(node: Node) -> Any:
    """Nodes of a checkpointed region are recomputed in backward: they never merge with nodes outside it."""
    return node.meta.get("ac_graph_id"), str(node.meta.get("recompute"))
