"""Operations that read a tensor as [M, K] read it through views that keep K.

    before    view: bf16[32, 64] = aten.view(rms_norm[0], [32, 64])         rms_norm[0]: bf16[2, 16, 64]
              quantize = te.quantize(view, e4m3[row+column])
    after     quantize = te.quantize(rms_norm[0], e4m3[row+column])

The columns of a tensor may also be divided by one view and put together again by the next.

So a `.view(-1, hidden)` that a model's author wrote between a norm and a linear does not stand between their fusion, nor does
the copy that dropout of p=0 is.

A copy of a product into new memory of the same layout is the product. So a parameter gets its first gradient, where a whole loop of
microbatches is one graph; gemm_add.py has the next products add to it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from te_dynamo.dialect.define import is_te
from te_dynamo.dialect.gemm import bias_grad
from te_dynamo.dialect.memory import RESHAPES, origin
from te_dynamo.dialect.quantize import quantize
from te_dynamo.passes.dialect.graph import call_like, calls, is_contiguous

_aten = torch.ops.aten
_CLONE = _aten.clone.default
_NEW = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.new_empty_strided.default,
}
_READ_THROUGH = (*RESHAPES, _CLONE)


def return_no_views(graph: Graph, count: int) -> None:
    """Views among the first `count` results are new tensors for autograd, as results of torch's own products are: a caller may write them.

    For graphs that run as they are: te operations give views where AOTAutograd has seen new tensors. Inductor's code allocates its results.
    """
    results: Any = graph.output_node().args[0]
    for node in results[:count]:
        if isinstance(node, Node) and node.target is _aten.view.default and origin(node).op != "placeholder":
            node.target = _aten._unsafe_view.default


def read_through_views(graph: Graph) -> int:
    """Rewires in place; returns how many views are read through. Views that nobody reads any more stay for dead-code removal."""
    read = _read_through_new_copies(graph)
    for node in calls(graph, quantize, bias_grad):
        if node.target is quantize and not node.args[1].reads_as_matrix:  # type: ignore[union-attr]
            continue
        source: Any = node.args[0]
        while (before := _before_views(source)) is not None:
            source, read = before, read + 1
        if source is not node.args[0]:
            # A node of its own, not another argument: torch keeps what it knows of a node's arguments in its meta.
            assert isinstance(node.target, torch._ops.OpOverload)
            node.replace_all_uses_with(call_like(graph, node.target, (source, *node.args[1:]), node))
            graph.erase_node(node)
    return read


def _read_through_new_copies(graph: Graph) -> int:
    read = 0
    for node in calls(graph, torch.ops.aten.copy.default):
        memory, source = node.args[:2]
        assert isinstance(memory, Node) and isinstance(source, Node)
        one, other = node.meta["val"], source.meta["val"]
        alike = one.shape == other.shape and one.stride() == other.stride() and one.dtype == other.dtype
        if memory.target in _NEW and is_te(source.target) and len(source.users) == 1 and alike:
            node.replace_all_uses_with(source)
            graph.erase_node(node)
            read += 1
    return read


def _before_views(node: Node) -> Node | None:
    """The nearest tensor that `node` is a view of, or several views in a row, with the columns of `node`."""
    source: Any = node
    while source.target in _READ_THROUGH:
        if source.target is _CLONE and origin(source.args[0]).op != "call_function":
            return None  # of an input that the model may write afterwards
        source = source.args[0]
        if _has_columns_of(source.meta["val"], node.meta["val"]):
            return source
    return None


def _has_columns_of(before: torch.Tensor, after: torch.Tensor) -> bool:
    same = before.dim() >= 1 and after.dim() >= 1 and isinstance(before.shape[-1], int)
    return same and before.shape[-1] == after.shape[-1] and is_contiguous(before)
