"""The option "low_memory", on by default: the order of backward, and when columnwise copies are made, by what is alive meanwhile.

A step's memory is at its peak where the gradients of a gate and what it gates are quantized: dy, gate and up (bf16) are read there
while two float8 copies of both gradients are written. Only the rowwise copy is needed at once. It is written into dy's memory
(lowering/in_place.py), and the columnwise copy is a transposition of it, made when dy, gate and up are gone.

    before    d: (f8e5m2[M, 2K], f8e5m2[2K, M], f32[2]) = te.gated_backward_quantize(dy, gate, up, 'silu', e5m2[row+column], .., stacked=True)
              dx = te.gemm_stacked(d[0], d[2], ..)
              dw = te.gemm_stacked(d[1], d[2], ..)
    after     d: (f8e5m2[M, 2K], f32[2]) = te.gated_backward_quantize(dy, gate, up, 'silu', e5m2[row], .., stacked=True)
              dx = te.gemm_stacked(d[0], d[1], ..)
              t: f8e5m2[2K, M] = te.transpose(d[0])
              dw = te.gemm_stacked(t, d[1], ..)

The same for te.gated_backward_quantize_halves, whose buffers te.gemm reads. Every bit is the same. It costs one more read of the codes. And of a linear's two products in backward the one goes first whose
operands, then gone, leave more room for the other's result.

    before    dx = te.gemm(q[0], .., w);  dw = te.gemm(q[1], .., x)
    after     dw = te.gemm(q[1], .., x);  dx = te.gemm(q[0], .., w)
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from te_dynamo.dialect.gated import gated_backward_quantize, gated_backward_quantize_halves
from te_dynamo.dialect.gemm import gemm
from te_dynamo.dialect.quantize import transpose
from te_dynamo.passes.dialect.graph import call_like, calls, item_users, read_item


def make_columns_late(graph: Graph) -> int:
    """Rewrites a graph that holds backward in place; returns how many copies are made later and how many products change places."""
    return _transpose_late(graph) + _products_that_free_first(graph)


def _transpose_late(graph: Graph) -> int:
    places = {node: place for place, node in enumerate(graph.nodes)}
    moved = 0
    for node in calls(graph, gated_backward_quantize, gated_backward_quantize_halves):
        quantizer = _quantizer_of_both(node)
        if quantizer is None or not (quantizer.rowwise and quantizer.columnwise):
            continue
        rows_only = quantizer.with_usage(columnwise=False)
        args = tuple(rows_only if arg is quantizer else arg for arg in node.args)
        assert isinstance(node.target, torch._ops.OpOverload)
        fused = call_like(graph, node.target, args, node)
        names, kept = quantizer.buffer_names(), rows_only.buffer_names()
        readers = item_users(node)
        for index, items in readers.items():
            if names[index] in kept:
                read_item(fused, kept.index(names[index]), items)
        for item in readers.get(names.index("transpose"), ()):
            first = min(item.users, key=lambda user: places[user])
            with graph.inserting_before(first):
                data = graph.call_function(item.target, (fused, kept.index("data")))  # type: ignore[arg-type]
            data.meta["val"] = fused.meta["val"][kept.index("data")]
            item.replace_all_uses_with(call_like(graph, transpose, (data,), first))
            graph.erase_node(item)
        graph.erase_node(node)
        moved += 1
    return moved


def _quantizer_of_both(node: Node) -> Any:
    """The quantizer, if the node's only results are buffers of one tensor, or one stack, of both gradients."""
    _, _, _, _, quantizer, keep_output, *stacked = node.args
    together = node.target is gated_backward_quantize_halves or stacked == [True]
    return quantizer if together and not keep_output else None


def _products_that_free_first(graph: Graph) -> int:
    places = {node: place for place, node in enumerate(graph.nodes)}
    moved = 0
    for first in list(calls(graph, gemm)):
        for second in _products_of_the_same(first):
            if places[second] < places[first] or any(places[x] > places[first] for x in second.all_input_nodes):
                continue
            if _peak(second, first) < _peak(first, second):
                first.prepend(second)
                places[second] = places[first]
                moved += 1
    return moved


def _products_of_the_same(product: Node) -> list[Node]:
    """The other products that read buffers of the node that made `product`'s first operand."""
    item = product.args[0]
    if not (isinstance(item, Node) and item.args and isinstance(item.args[0], Node)):
        return []
    others = [user for sibling in item.args[0].users for user in sibling.users if user is not product]
    return [other for other in dict.fromkeys(others) if other.target is gemm]


def _peak(first: Node, second: Node) -> Any:
    """Bytes on top of what is alive before the two, if they run in this order."""
    freed = sum(_bytes(operand) for operand in first.all_input_nodes if list(operand.users) == [first])
    return max(_bytes(first), _bytes(first) - freed + _bytes(second))


def _bytes(node: Node) -> Any:
    """Bytes of the node's tensor. It is 0 where the size is a symbol, so that nothing moves for such a tensor."""
    value = node.meta["val"]
    return value.numel() * value.element_size() if isinstance(value.numel(), int) else 0
