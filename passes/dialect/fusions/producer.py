"""What every "producer + quantize" fusion shares: moving the readers of both nodes to the fused one.

A producer writes y; te.quantize reads it. The fused operation returns [y if anyone else reads it, the producer's other
results, the quantizer's buffers]. It stands where the producer stood, so everything that read either still comes after.

The te.quantize of a quantizer without `fused_producers` stays by itself.
"""

from __future__ import annotations

from torch.fx import Graph, Node

from te_dynamo.dialect.quantize import quantize
from te_dynamo.passes.dialect.graph import item_users, read_item

__all__ = ["other_readers", "quantize_of", "take_over"]


def quantize_of(y: Node) -> Node | None:
    """The one te.quantize that reads `y`, if a fused kernel knows its format; None without one, or with several that differ
    (they cannot share one pass)."""
    readers = [user for user in y.users if user.target is quantize]
    if len(readers) != 1 or not readers[0].args[1].fused_producers:  # type: ignore[union-attr]
        return None
    return readers[0]


def other_readers(y: Node, *known: Node | None) -> list[Node]:
    """Who reads `y` beside the known nodes."""
    return [user for user in y.users if user not in known]


def take_over(graph: Graph, fused: Node, position: int, buffers_of: Node) -> int:
    """Readers of the quantize node's buffers read `fused`'s results from `position` on; returns the position after them."""
    for index, readers in item_users(buffers_of).items():
        read_item(fused, position + index, readers)
    graph.erase_node(buffers_of)
    return position + len(buffers_of.meta["val"])
