"""Selective checkpointing saves of a linear its product alone.

A policy's answer for te.linear marks every node that it expands to. The author of a policy that saves products expects their
operands to be computed again in backward, as an mm's are: so are the quantized operands.
"""

from __future__ import annotations

import operator

from torch.fx import Graph
from torch.utils.checkpoint import CheckpointPolicy

from te_dynamo.dialect.quantize import quantize


def save_products_only(graph: Graph) -> int:
    """Marks in place, before forward and backward are divided; returns how many quantizations are computed again."""
    marked = 0
    for node in graph.find_nodes(op="call_function", target=quantize):
        if node.meta.get("recompute") in (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE):
            for each in (node, *(user for user in node.users if user.target is operator.getitem)):
                each.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE
            marked += 1
    return marked
