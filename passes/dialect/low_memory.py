"""The option "low_memory", on by default: the order of backward, and when columnwise copies are made, by what is alive meanwhile.

A step's memory is at its peak where the gradients of a gate and what it gates are quantized: dy, gate and up (bf16) are read there
while two float8 copies of both gradients are written. Only the rowwise copy is needed at once. It is written into dy's memory
(lowering/in_place.py), and the columnwise copy is a transposition of it, made when dy, gate and up are gone.

    before    d: (f8e5m2[M, 2K], f8e5m2[2K, M], f32[2]) = te.gated_backward_quantize(dy, gate, up, 'silu', e5m2[row+column], .., stacked=True)
              dx = te.gemm([d[0], d[2]], ..)
              dw = te.gemm([d[1], d[2]], ..)
    after     d: (f8e5m2[M, 2K], f32[2]) = te.gated_backward_quantize(dy, gate, up, 'silu', e5m2[row], .., stacked=True)
              dx = te.gemm([d[0], d[1]], ..)
              t: f8e5m2[2K, M] = te.transpose(d[0])
              dw = te.gemm([t, d[1]], ..)

The same for te.gated_backward_quantize_halves, whose buffers te.gemm reads, and, but for the place in dy's memory, for
te.activation_backward_quantize. Every bit is the same. It costs one more read of the codes.

With scales of rows or blocks columns are no transposition of the rows. Where the graph's peak is there, both gradients are written in 16 bits,
dgate into dy's memory and dup into up's where that ends there (lowering/in_place.py), and are quantized when gate and up are gone. It costs a
write and a read of both.

    before    d = te.gated_backward_quantize(dy, gate, up, 'silu', e4m3 1x128[row+column], ..)
    after     d: (bf16[M, K], bf16[M, K]) = te.gated_backward(dy, gate, up, 'silu')
              q = te.quantize(d[0], e4m3 1x128[row+column]);  q_1 = te.quantize(d[1], e4m3 1x128[row+column])

Of a linear's two products in backward the one goes first whose operands, then gone, leave more room for the other's result.

    before    dx = te.gemm([q[0], ..], .., w, ..);  dw = te.gemm([q[1], ..], .., x, ..)
    after     dw = te.gemm([q[1], ..], .., x, ..);  dx = te.gemm([q[0], ..], .., w, ..)

And a product that has more bytes than the operands which live longer for it, or a quantization or a transposition of one of the graph's inputs, is
made right before it is read. So the last dgrad of a checkpointed region waits until the region's forward is computed again. A graph with
collectives keeps its order, by which these overlap with products.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.utils._pytree import tree_leaves

from te_dynamo.dialect.activation import activation_backward_quantize
from te_dynamo.dialect.define import is_te
from te_dynamo.dialect.gated import gated_backward, gated_backward_quantize, gated_backward_quantize_halves
from te_dynamo.dialect.gemm import Gemm, gemm
from te_dynamo.dialect.memory import byte_hint, is_product, is_view, may_be_overwritten
from te_dynamo.dialect.quantize import quantize, transpose
from te_dynamo.dialect.stacked import quantize_stacked
from te_dynamo.passes.dialect.graph import call_like, calls, getitem_after, item_users, read_item
from te_dynamo.passes.dialect.live_memory import timeline
from te_dynamo.passes.dialect.saved_weights import FEWEST_BYTES

MOST_APART = 8
"""So many gradients are taken apart at most: for each the graph is walked once."""


def make_columns_late(graph: Graph) -> int:
    """Rewrites a graph that holds backward in place; returns how many nodes are made elsewhere."""
    return _transpose_late(graph) + _products_that_free_first(graph) + _made_when_read(graph)


def write_gradients_in_16_bits(graph: Graph) -> int:
    """Rewrites backward in place where its peak is, the order of its nodes being final; returns how many quantizations are taken apart."""
    found = list(filter(_saves_in_16_bits, calls(graph, gated_backward_quantize)))
    apart = 0
    for _ in found[:MOST_APART]:
        peak, _ = max(timeline(graph), key=operator.itemgetter(1))
        if peak not in found:
            break
        _quantize_apart(graph, peak)
        apart += 1
    return apart


def _transpose_late(graph: Graph) -> int:
    places = {node: place for place, node in enumerate(graph.nodes)}
    moved = 0
    for node in calls(graph, activation_backward_quantize, gated_backward_quantize, gated_backward_quantize_halves):
        quantizer, others = _quantizer_of_one(node)
        if quantizer is None or not (quantizer.one_scale and quantizer.rowwise and quantizer.columnwise):
            continue
        rows_only = quantizer.with_usage(columnwise=False)
        args = tuple(rows_only if arg is quantizer else arg for arg in node.args)
        assert isinstance(node.target, torch._ops.OpOverload)
        fused = call_like(graph, node.target, args, node)
        names, kept = ([*others, *q.buffer_names()] for q in (quantizer, rows_only))
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


def _quantizer_of_one(node: Node) -> tuple[Any, list[str]]:
    """(the quantizer, results before its buffers), if the buffers are of one tensor, or of one stack of both gradients, which is not kept."""
    plain = node.target is activation_backward_quantize
    quantizer, keep_output, *last = node.args[3 if plain else 4 :]
    one = plain or node.target is gated_backward_quantize_halves or last == [True]
    return (quantizer if one and not keep_output else None), ["dbias"] * (plain and bool(last[0]))


def _saves_in_16_bits(node: Node) -> bool:
    """Whether dup, beside dgate in dy's place, has half of the bytes of what te.gated_backward_quantize makes."""
    args: Any = node.args
    dy, gate, _, _, quantizer, *others = args
    dup = byte_hint(gate.meta["val"])
    two_copies = sum(map(byte_hint, node.meta["val"])) >= 2 * dup and not (quantizer.one_scale or any(others))
    return two_copies and dup >= FEWEST_BYTES and may_be_overwritten(dy, node)


def _quantize_apart(graph: Graph, node: Node) -> None:
    """te.gated_backward and quantizations take the place of te.gated_backward_quantize."""
    quantizer: Any = node.args[4]
    both = call_like(graph, gated_backward, node.args[:4], node)
    gradients = [getitem_after(both, index) for index in (1, 0)][::-1]
    made = [call_like(graph, quantize, (gradient, quantizer), node) for gradient in gradients]
    count = len(quantizer.buffer_names())
    for index, items in item_users(node).items():
        read_item(made[index // count], index % count, items)
    graph.erase_node(node)


def _products_that_free_first(graph: Graph) -> int:
    places = {node: place for place, node in enumerate(graph.nodes)}
    moved = 0
    for first in list(products_of_a_linear(graph)):
        for second in _products_of_the_same(first):
            if places[second] < places[first] or any(places[x] > places[first] for x in second.all_input_nodes):
                continue
            if _peak(second, first) < _peak(first, second):
                first.prepend(second)
                places[second] = places[first]
                moved += 1
    return moved


def products_of_a_linear(graph: Graph) -> list[Node]:
    """The products of one linear alone."""
    return [node for node in calls(graph, gemm) if is_of_a_linear(node)]


def is_of_a_linear(node: Node) -> bool:
    return node.target is gemm and Gemm.of(node).of_a_linear


def _products_of_the_same(product: Node) -> list[Node]:
    """The other products that read buffers of the node that made `product`'s first operand."""
    item = product.all_input_nodes[0]
    if not (isinstance(item, Node) and item.args and isinstance(item.args[0], Node)):
        return []
    others = [user for sibling in item.args[0].users for user in sibling.users if user is not product]
    return [other for other in dict.fromkeys(others) if is_of_a_linear(other)]


def _peak(first: Node, second: Node) -> Any:
    """Bytes on top of what is alive before the two, if they run in this order."""
    operands = [operand for operand in first.all_input_nodes if not is_made_of_inputs(operand)]
    freed = sum(_bytes(operand) for operand in operands if list(operand.users) == [first])
    return max(_made_for(first) + _bytes(first), _bytes(first) - freed + _made_for(second) + _bytes(second))


def _made_for(product: Node) -> Any:
    """Bytes of the operands that are made right before the product."""
    return sum(_bytes(operand) for operand in product.all_input_nodes if is_made_of_inputs(operand))


def _made_when_read(graph: Graph) -> int:
    if keeps_its_order(graph):
        return 0
    moved = 0
    for node in reversed(list(graph.nodes)):
        if (node.target is gemm and Gemm.of(node).addend is None) or is_made_of_inputs(node):
            moved += _moved_to_reader(node)
    return moved


def keeps_its_order(graph: Graph) -> bool:
    """Whether a graph has collectives, or is of no backward."""
    return any("c10d" in str(node.target) for node in graph.nodes) or not any(map(_is_tangent, graph.nodes))


def _moved_to_reader(node: Node) -> bool:
    together = [node, *_views_of(node)]
    readers = [user for each in together for user in each.users if user not in together]
    if not readers:
        return False
    first = min(readers)
    held = sum(_bytes(x) for x in node.all_input_nodes if max(x.users) < first and not is_callers(x))
    if _bytes(node) <= held or not _is_anything_made(node, first, together):
        return False
    for each in together:
        first.prepend(each)
    return True


def _is_anything_made(node: Node, end: Node, aside: list[Node]) -> bool:
    """Whether a te operation or a product of torch's stands between the two nodes."""
    while (node := node.next) is not end:
        if node not in aside and (is_te(node.target) or is_product(node)):
            return True
    return False


def _views_of(node: Node) -> list[Node]:
    views = [user for user in node.users if user.target is operator.getitem or is_view(user)]
    return [each for view in views for each in (view, *_views_of(view))]


def is_made_of_inputs(node: Node) -> bool:
    """Whether it is a quantization or a transposition of what the graph's caller owns, or a buffer of one."""
    made: Any = node.args[0] if node.target is operator.getitem else node
    return made.target in (quantize, quantize_stacked, transpose) and all(map(is_callers, made.all_input_nodes))


def is_callers(node: Any) -> bool:
    while is_view(node):
        node = node.args[0]
    return bool(node.op == "placeholder" and (_is_tangent(node) or "primals" in node.name))


def _is_tangent(node: Node) -> bool:
    return node.op == "placeholder" and "tangents" in node.name


def _bytes(node: Node) -> Any:
    """Bytes of the node's tensors. It is 0 where a size is a symbol, so that nothing moves for such a tensor."""
    values = [value for value in tree_leaves(node.meta["val"]) if isinstance(value, torch.Tensor)]
    known = all(isinstance(value.numel(), int) for value in values)
    return sum(value.numel() * value.element_size() for value in values) if known else 0
