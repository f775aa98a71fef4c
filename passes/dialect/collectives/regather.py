"""The option "regather": forward saves a rank's own part of what it gathered, and backward gathers it again.

    before    y: bf16[B, P*S, K] = what ranks gather of x: bf16[B, S, K]                       see fusions/gather_quantize.py
              q: (f8e4m3[M, K], f8e4m3[K, M], f32[1]) = te.quantize(y, e4m3[row+column])       M = B*P*S
              h = te.gemm([q[0], q[2]], .., [w[0], ..], ..)
              dw = te.gemm([dh[1], dh[2]], .., [q[1], q[2]], ..)
    after     c: (f8e4m3[M/P, K], f32[1]) = te.quantize_with_amax(x, e4m3[row], the largest amax)
              h = te.gemm([what ranks gather of c[0], c[1]], .., w, ..)
              t: f8e4m3[K, M] = te.transpose(what ranks gather of c[0])                         in backward's graph
              dw = te.gemm([dh[1], dh[2]], .., [t, c[1]], ..)

Saved are c[0] and c[1] in place of q[1] and q[2]: a byte for each value of the rank's own tokens, where 16 bits save two for each
value of all of them. Every bit is the same. An all-gather that checkpointing repeats anyway is left, as backward saves nothing of it.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node
from torch.utils.checkpoint import CheckpointPolicy

from te_dynamo.passes.dialect.collectives.gather_quantize import (
    gather_codes,
    gather_own,
    gathered_quantizations,
    quantize_own,
    read_instead,
    reason_to_leave,
)
from te_dynamo.passes.dialect.graph import call_like, item_users
from te_dynamo.passes.dialect.saved_weights import depending_on_tangents

_REPEATED = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


def gather_again_in_backward(graph: Graph) -> int:
    """Rewrites a joint graph in place; returns how many of forward's all-gathers backward repeats."""
    of_backward = depending_on_tangents(graph)
    repeated = 0
    for gathered in list(gathered_quantizations(graph)):
        node = gathered.quantize
        if node in of_backward or node.meta.get("recompute") in _REPEATED or reason_to_leave(gathered):
            continue
        items = [item for each in item_users(node).values() for item in each]
        readers = {user for item in items for user in item.users if user in of_backward}
        if not readers:
            continue
        first = min(readers)
        # It starts where dy is there, so that a product which is made before `first` hides it.
        start = min(x for x in first.all_input_nodes if x in of_backward)
        own, scale_inv = quantize_own(graph, gathered)
        # As int8: the partitioner would take a second all-gather of the same bytes for the first one.
        again = call_like(graph, torch.ops.aten.view.dtype, (own, torch.int8), start)
        rows = gather_codes(graph, gathered, again, start, first)
        read_instead(node, rows, scale_inv, first, readers)
        _keep_in_backward(again, readers)
        gather_own(graph, gathered, own, scale_inv)
        repeated += 1
    return repeated


def _keep_in_backward(node: Node, readers: set[Node]) -> None:
    """Tags the node, and what is made of it before `readers`."""
    node.meta["partitioner_tag"] = "must_be_in_backward"
    for user in node.users.keys() - readers:
        _keep_in_backward(user, readers)
