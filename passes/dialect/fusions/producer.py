"""What every "producer + quantize" fusion shares: moving the readers of both nodes to the fused one.

A producer writes y; te.quantize reads it. The fused operation takes (..., quantizer, keep_output, ...) and returns [y if anyone else reads
it, the producer's other results, the quantizer's buffers]. It stands where the producer stood, so everything that read either still comes after.

The te.quantize of a quantizer without `fused_producers` stays by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch.fx import Graph, Node

from te_dynamo.dialect.quantize import quantize
from te_dynamo.passes.dialect.graph import call_like, item_users, read_item


def quantize_of(y: Node) -> Node | None:
    """The one te.quantize that reads `y`, if a fused kernel knows its format; None without one, or with several that differ
    (they cannot share one pass)."""
    readers = [user for user in y.users if user.target is quantize]
    if len(readers) != 1 or not readers[0].args[1].fused_producers:  # type: ignore[union-attr]
        return None
    return readers[0]


def fuse_producer(
    node: Node,
    target: torch._ops.OpOverload,
    outputs: Sequence[Node],
    quantized: Sequence[Node],
    before: tuple[Any, ...],
    behind: tuple[Any, ...] = (),
    others: Sequence[list[Node]] = (),
) -> None:
    """Puts target(*before, quantizer, keep_output, *behind) in the place of `node` and of what is `quantized`.

    outputs: the values that are quantized, `node` itself or made of it. quantized: the te.quantize of each, or of its cast, or the
    te.quantize_stacked of all. others: the readers of each further result of `node`.
    """
    graph = node.graph
    casts = [read for one in quantized if isinstance(read := one.args[0], Node) and read not in outputs]
    known = {*quantized, *casts, *chain.from_iterable(others)}
    keep_output = any(user not in known for output in outputs for user in output.users)
    fused = call_like(graph, target, (*before, quantized[0].args[1], keep_output, *behind), node)
    position = keep_output * len(outputs)
    for readers in others:
        read_item(fused, position, readers)
        position += 1
    for one in quantized:
        position = take_over(graph, fused, position, one)
    for cast in casts:
        graph.erase_node(cast)
    for index, output in enumerate(outputs):
        if keep_output:
            read_item(fused, index, [output])
        else:
            graph.erase_node(output)
    if node not in outputs:
        for left in (*node.users, node):
            graph.erase_node(left)


def take_over(graph: Graph, fused: Node, position: int, buffers_of: Node) -> int:
    """Readers of the quantize node's buffers read `fused`'s results from `position` on; returns the position after them."""
    for index, readers in item_users(buffers_of).items():
        read_item(fused, position + index, readers)
    graph.erase_node(buffers_of)
    return position + len(buffers_of.meta["val"])
