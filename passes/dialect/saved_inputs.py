"""Backward makes its own views of the graph's inputs: forward saves the inputs themselves.

    before    view: f32[32, 64] = aten.view(x, [32, 64])                 saved by forward
              dw = aten.mm(dy, view)
    after     x saved by forward;  in backward's graph view = aten.view(x, [32, 64]) and dw, as before

A view that Inductor's code makes shares the input's memory and not its version counter. Where the user writes the input before backward, torch
raises its error for the input itself; of the view the gradient would be that of what was written. A view costs nothing.
"""

from __future__ import annotations

from torch.fx import Graph, Node
from torch.utils.checkpoint import CheckpointPolicy

from te_dynamo.dialect.memory import is_view
from te_dynamo.passes.dialect.saved_weights import depending_on_tangents


def save_inputs_themselves(graph: Graph) -> int:
    """Marks views, before forward and backward are divided; returns how many."""
    read = depending_on_tangents(graph)
    views = [node for node in graph.nodes if node not in read and _is_view_of_input(node)]
    marked = 0
    for view in reversed(views):  # a view of a view comes behind it
        if not read.isdisjoint(view.users):
            read.add(view)
            view.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
            marked += 1
    return marked


def _is_view_of_input(node: Node) -> bool:
    base = node.args[0] if is_view(node) else None
    return isinstance(base, Node) and (base.op == "placeholder" or _is_view_of_input(base))
