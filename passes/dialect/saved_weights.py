"""What backward has of a weight: the columnwise data that forward made, or data that backward makes again from the weight itself.

    before    w: (f8e4m3[N, K], f8e4m3[K, N], f32[1]) = te.quantize(weight, e4m3[row+column])
              y = te.gemm([x[0], x[2]], .., [w[0], w[2]], ..)
              dx = te.gemm([dy[0], dy[2]], .., [w[1], w[2]], ..)
    after     w: (f8e4m3[N, K], f8e4m3[K, N], f32[1]) = te.quantize(weight, e4m3[row+column])      usage.py takes its columns away
              y = te.gemm([x[0], x[2]], .., [w[0], w[2]], ..)
              v: (f8e4m3[K, N], f32[1]) = te.quantize(weight, e4m3[column])                        in backward's graph
              dx = te.gemm([dy[0], dy[2]], .., [v[0], v[1]], ..)

Of a weight that is quantized already (a QuantizedTensor with rows alone) backward makes the columns by te.transpose, whatever the bytes.

Forward then saves the weight, which is an input and costs nothing. Under FSDP it is the parameter, whose unsharded memory FSDP frees
between forward and backward. Every bit is the same, for a price of one more pass over the weight.

Without FSDP the bytes decide. What 16 bits save of a linear is x, two bytes a value; here x is saved by columns, one byte a value.
In the order of forward, a weight's columns are saved where the bytes that were won so far pay for them. So the graph keeps no more
than in 16 bits at any place in backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.fx import Graph, Node
from torch.utils.checkpoint import CheckpointPolicy

from te_dynamo.dialect.memory import byte_hint, is_copy, is_view, is_written_input
from te_dynamo.dialect.quantize import quantize, transpose
from te_dynamo.dialect.stacked import quantize_stacked
from te_dynamo.passes.dialect.graph import calls, item_users
from te_dynamo.passes.dialect.usage import quantize_again

FEWEST_BYTES = 2**20
"""Columns of fewer bytes are saved unless all weights are remade: launches would take longer than the bytes are worth."""


def choose_saved_weights(graph: Graph, choice: str | None) -> int:
    """Rewrites a joint graph in place; returns how many weights backward quantizes again.

    choice: "original" for all of them, "quantized" for none, None by the bytes.
    """
    of_backward = depending_on_tangents(graph)
    for node in calls(graph, transpose):
        if node not in of_backward and set(node.users) <= of_backward:
            node.meta["partitioner_tag"] = "must_be_in_backward"
    if choice == "quantized":
        return 0
    won = remade = 0
    for node in list(calls(graph, quantize, quantize_stacked)):
        items = {index: readers for index, readers in item_users(node).items() if _all_users(readers) & of_backward}
        if node in of_backward or not items:
            continue
        # Forward may read it too, as the codes of blocks of 32x32; one scale is nothing.
        sizes = [byte_hint(node.meta["val"][index]) for index in items]
        saved = sum(size for size in sizes if size > 4)
        if not _is_weight(node, of_backward):
            won += _saved_in_16_bits(node, of_backward) - saved
        elif choice == "original" or (saved > won and saved >= FEWEST_BYTES):
            _remake(node, items, of_backward)
            remade += 1
        else:
            won -= saved
    return remade


def depending_on_tangents(graph: Graph) -> set[Node]:
    found = {node for node in graph.nodes if node.op == "placeholder" and "tangents" in node.name}
    for node in graph.nodes:
        if node.op == "call_function" and not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def _all_users(nodes: list[Node]) -> set[Node]:
    return {user for node in nodes for user in node.users}


def _is_weight(node: Node, of_backward: set[Node]) -> bool:
    """Whether it is made of inputs of the graph alone, which nothing writes, and forward's GEMMs read it as their second operand."""
    read_first = any(
        item in user.args[:1]
        for items in item_users(node).values()
        for item in items
        for user in item.users
        if user not in of_backward
    )
    return not read_first and all(s.op == "placeholder" and not is_written_input(s) for s in _sources(node))


def _sources(node: Node) -> Iterator[Node]:
    """What a quantization reads, before views and casts."""
    for source in node.all_input_nodes:
        yield from _sources(source) if is_view(source) or is_copy(source) else (source,)


def _saved_in_16_bits(node: Node, of_backward: set[Node]) -> int:
    """Bytes that the linears of this operand would save more, if it were not quantized: none of an input of the graph, nor of what
    backward reads for something else."""
    source: Any = node.args[0]
    while is_view(source):
        source = source.args[0]
    if source.op == "placeholder" or any(user in of_backward for user in _through_views(source)):
        return 0
    return byte_hint(source.meta["val"])


def _through_views(node: Node) -> Iterator[Node]:
    for user in node.users:
        yield from _through_views(user) if is_view(user) else (user,)


def _remake(node: Node, items: dict[int, list[Node]], of_backward: set[Node]) -> None:
    """Has what backward reads of the buffers made there."""
    again = quantize_again(node, of_backward & _all_users([item for each in items.values() for item in each]))
    for tag in ("recompute", "ac_graph_id"):
        again.meta.pop(tag, None)
    again.meta["partitioner_tag"] = "must_be_in_backward"
    for cast in _casts(node):
        cast.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE


def _casts(node: Node) -> Iterator[Node]:
    """The copies between the weight and its quantization, which forward would save."""
    for source in node.all_input_nodes:
        if is_copy(source):
            yield source
        if is_copy(source) or is_view(source):
            yield from _casts(source)
