"""Operations that read a tensor as [M, K] read it through views that keep K.

    before    view: bf16[32, 64] = aten.view(rms_norm[0], [32, 64])         rms_norm[0]: bf16[2, 16, 64]
              quantize = te.quantize(view, e4m3[row+column])
    after     quantize = te.quantize(rms_norm[0], e4m3[row+column])

So a `.view(-1, hidden)` that a model's author wrote between a norm and a linear does not stand between their fusion, nor does
the copy that dropout of p=0 is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from te_dynamo.ops.gemm import bias_grad
from te_dynamo.ops.quantize import quantize
from te_dynamo.passes.graph import RESHAPES, call_like, calls

__all__ = ["read_through_views"]

_CLONE = torch.ops.aten.clone.default
_READ_THROUGH = (*RESHAPES, _CLONE)


def read_through_views(graph: Graph) -> int:
    """Rewires in place; returns how many views are read through. Views that nobody reads any more stay for dead-code removal."""
    read = 0
    for node in calls(graph, quantize, bias_grad):
        if node.target is quantize and not node.args[1].reads_as_matrix:  # type: ignore[union-attr]
            continue
        source: Any = node.args[0]
        while source.target in _READ_THROUGH and _keeps_columns(source):
            source, read = source.args[0], read + 1
        if source is not node.args[0]:
            # A node of its own, not another argument: torch keeps what it knows of a node's arguments in its meta.
            assert isinstance(node.target, torch._ops.OpOverload)
            node.replace_all_uses_with(call_like(graph, node.target, (source, *node.args[1:]), node))
            graph.erase_node(node)
    return read


def _keeps_columns(view: Node) -> bool:
    source = view.args[0]
    assert isinstance(source, Node)
    if view.target is _CLONE and source.op != "call_function":
        return False  # of an input that the model may write afterwards
    before, after = source.meta["val"], view.meta["val"]
    same = before.dim() >= 1 and after.dim() >= 1 and isinstance(before.shape[-1], int)
    return same and before.shape[-1] == after.shape[-1] and before.is_contiguous()
