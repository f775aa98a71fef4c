"""The gradient of a tensor whose halves a te.gated reads, in one form: both gradients side by side.

    before    full: bf16[M, 2K] = aten.full([M, 2K], 0)                      of gate, up = h[:, :K], h[:, K:]
              padded: bf16[M, 2K] = aten.slice_scatter(full, d[0], 1, 0, K)
              padded_1: bf16[M, 2K] = aten.slice_scatter(full, d[1], 1, K)
              dh = aten.add(padded, padded_1)
    after     dh = aten.cat([d[0], d[1]], 1)

    before    stack: bf16[M, 2, K] = aten.stack([d[0], d[1]], 1)             of gate, up = h.view(M, 2, K).unbind(1)
    after     cat: bf16[M, 2K] = aten.cat([d[0], d[1]], 1)
              stack: bf16[M, 2, K] = aten.view(cat, [M, 2, K])

h.chunk(2, -1) and h.split(K, -1) give te.cat themselves. Not a fusion: adding zeros makes 0 of -0, so that with and without one
the same must stand here. Gradients of other operations are left as they are: Inductor fuses those with what made them.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch.fx import Graph, Node

from te_dynamo.dialect.gated import gated_backward
from te_dynamo.passes.dialect.graph import call_like, calls, item_users

_aten = torch.ops.aten


def put_halves_side_by_side(graph: Graph) -> int:
    """Rewrites in place; returns how many sums and stacks became concatenations."""
    put = 0
    for node in calls(graph, gated_backward):
        items = [item for items in item_users(node).values() for item in items]
        for reader in dict.fromkeys(user for item in items for user in item.users):
            put += _put(graph, reader, *_of_a_stack(reader))
        for total in dict.fromkeys(user for item in items for padded in item.users for user in padded.users):
            put += _put(graph, total, *_of_a_sum(total))
    return put


def _put(graph: Graph, node: Node, *gradients: Node) -> bool:
    """`node` becomes both gradients side by side, in its shape; False without them, or if they are not those of one te.gated."""
    if not _of_one_gated(gradients):
        return False
    last = gradients[0].meta["val"].dim() - 1
    joined = call_like(graph, _aten.cat.default, (list(gradients), last), node)
    if node.target is _aten.stack.default:
        joined = call_like(graph, _aten.view.default, (joined, list(node.meta["val"].shape)), node)
    node.replace_all_uses_with(joined)
    graph.erase_node(node)
    return True


def _of_one_gated(gradients: Sequence[Node]) -> bool:
    if any(gradient.target is not operator.getitem for gradient in gradients):
        return False
    sources: set[Any] = {gradient.args[0] for gradient in gradients}
    indices: Any = [gradient.args[1] for gradient in gradients]
    return len(sources) == 1 and sorted(indices) == [0, 1] and sources.pop().target is gated_backward


def _of_a_stack(stack: Node) -> tuple[Node, ...]:
    """What aten.stack puts one above the other in each row; nothing of another node."""
    if stack.target is not _aten.stack.default or stack.kwargs or len(stack.args) != 2:
        return ()
    (gradients, dim), shape = stack.args, stack.meta["val"].shape
    in_rows = dim in (len(shape) - 2, -2) and all(isinstance(size, int) for size in shape)
    return tuple(gradients) if in_rows else ()  # type: ignore[arg-type]


def _of_a_sum(total: Node) -> tuple[Node, ...]:
    """(left half, right half) where `total` adds the two, each between zeros; nothing of another node."""
    if total.target is not _aten.add.Tensor or total.kwargs or len(total.args) != 2:
        return ()
    halves = dict(filter(None, map(_half, total.args)))
    return (halves[0], halves[1]) if len(halves) == 2 else ()


def _half(padded: Any) -> tuple[int, Node] | None:
    """(which half of the columns, what is there) of a node that has zeros in the other."""
    if not isinstance(padded, Node) or padded.kwargs:
        return None
    if padded.target is _aten.slice_backward.default:
        part, place = padded.args[0], padded.args[2:]
    elif padded.target is _aten.slice_scatter.default and _is_zero(padded.args[0]):
        part, place = padded.args[1], padded.args[2:]
    else:
        return None
    dim, start, end, step = cast(Any, (*place, *(0, None, None, 1)[len(place) :]))
    rank, width = padded.meta["val"].dim(), padded.meta["val"].shape[-1]
    if not all(isinstance(n, int) for n in (width, start or 0, end or 0)) or dim not in (rank - 1, -1) or step != 1:
        return None
    columns = range(width)[start:end]
    whole = [range(width // 2), range(width // 2, width)]
    return (whole.index(columns), part) if width % 2 == 0 and columns in whole else None  # type: ignore[return-value]


def _is_zero(node: Any) -> bool:
    return node.target is _aten.full.default and node.args[1] == 0
