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

from te_dynamo.dialect.define import is_te
from te_dynamo.dialect.memory import RESHAPES, is_returned
from te_dynamo.dialect.quantize import quantize
from te_dynamo.passes.dialect.graph import call_like, calls, replace_items
from te_dynamo.quantized.quantizers import Quantizer

_VIEWS = {*RESHAPES, torch.ops.aten.permute.default, torch.ops.aten.t.default}


def merge_common_subexpressions(graph: Graph) -> int:
    """Merges in place; returns how many nodes went away."""
    return _merge_usages(graph) + _merge_equal(graph)


def _merge_equal(graph: Graph) -> int:
    first: dict[Any, Node] = {}
    same: dict[Node, Node] = {}  # the first node of the same value, found through any pure operation
    merged = 0
    for node in list(graph.nodes):
        if not _is_pure(node):
            continue
        args = torch.fx.map_arg((node.args, node.kwargs), lambda n: same.get(n, n))
        try:
            original = same[node] = first.setdefault((node.target, args, *map(type, node.args)), node)
        except TypeError:  # an unhashable argument
            continue
        merges = is_te(node.target) or node.target in _VIEWS or node.target is operator.getitem
        if original is not node and merges and not _must_stay_apart(original, node):
            _agree_on_recomputation(original, node)
            node.replace_all_uses_with(original)
            graph.erase_node(node)
            merged += 1
    return merged


def _must_stay_apart(one: Node, other: Node) -> bool:
    """Whether the graph returns a result that would be the other's too: the caller may write it, where backward saves the other, and autograd
    adds to a first gradient in place. A view or an item of one tensor is that tensor already."""
    values, others = _returned(one), _returned(other)
    if is_te(one.target) and None in values | others:
        return True
    return not values.isdisjoint(others)


def _returned(node: Node) -> set[Any]:
    """Which of a node's results the graph returns: the indices of items, None of a tensor."""
    if isinstance(node.meta.get("val"), torch.Tensor):
        return {None} if is_returned(node) else set()
    return {user.args[1] for user in node.users if user.target is operator.getitem and is_returned(user)}


def _is_pure(node: Node) -> bool:
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return node.target is operator.getitem
    return not node.target._schema.is_mutable and torch.Tag.nondeterministic_seeded not in node.target.tags


def _agree_on_recomputation(node: Node, other: Node) -> None:
    """The tags that `node` has when it stands for `other` too.

    AOTAutograd's own CSE merges across the border of a checkpointed region, and what is needed outside of it is not
    recomputed. Of an operation with several results each item has a tag: one that must be recomputed of an operation that is
    not would be an error.
    """
    if node.meta.get("recompute") != other.meta.get("recompute"):
        for each in (node, *node.users, *other.users):
            if each is node or each.target is operator.getitem:
                each.meta.pop("recompute", None)
                each.meta.pop("ac_graph_id", None)


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
    """Nodes of a checkpointed region are recomputed in backward: theirs never become usages of a tensor outside it."""
    return node.meta.get("ac_graph_id"), str(node.meta.get("recompute"))
