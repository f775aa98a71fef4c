"""What is alive at each kernel of a lowered graph, counted from the graph: a step's peak without a GPU."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.utils._pytree import tree_leaves

from te_dynamo.dialect import is_te

__all__ = ["peak_bytes", "timeline"]

_CALLERS = ("primals", "tangents")
"""Inputs that the caller keeps: parameters, the model's input, the gradient of its output."""


def peak_bytes(graph: Graph) -> int:
    """The most that is alive at once, beside what the caller keeps."""
    return max(alive for _, alive in timeline(graph))


def timeline(graph: Graph) -> Iterator[tuple[Node, int]]:
    """(kernel, bytes alive while it runs). What other operations make counts where a kernel reads it or the graph returns it:
    the rest is inside Inductor's own kernels."""
    owners = _owners(graph)
    last = {owner: node for node in graph.nodes for read in node.all_input_nodes for owner in owners[read]}
    kept = {owner for owner in owners[graph.output_node()]}
    alive = {n: _bytes(n) for n in graph.nodes if n.op == "placeholder" and not n.name.startswith(_CALLERS)}
    for node in graph.nodes:
        if node.op == "call_function" and _allocates(node):
            alive[node] = _bytes(node)
        if _is_kernel(node):
            yield node, sum(alive.values())
        for owner in [owner for owner in alive if last.get(owner, owner) is node and owner not in kept]:
            del alive[owner]


def _owners(graph: Graph) -> dict[Node, set[Node]]:
    """Whose memory a node's results lie in: its own, or of the tensors that it views or writes."""
    owners: dict[Node, set[Node]] = {}
    for node in graph.nodes:
        reads = [owners[read] for read in node.all_input_nodes]
        if node.op == "output":
            owners[node] = set().union(*reads)
        elif _is_launch(node):
            owners[node] = set()
        elif node.target is operator.getitem and _is_launch(node.args[0]):
            owners[node] = owners[node.args[0].kwargs["kwargs"][node.args[1]]]
        elif node.target is operator.getitem or _is_view(node):
            owners[node] = reads[0]
        else:
            owners[node] = {node}
    return owners


def _allocates(node: Node) -> bool:
    if _is_launch(node) or node.target is operator.getitem or _is_view(node):
        return False
    return node.target is torch.ops.aten.empty.memory_format or _is_kernel(node) or _leaves_its_kernel(node)


def _leaves_its_kernel(node: Node) -> bool:
    readers = {reader for user in node.users for reader in ([user, *user.users] if _is_view(user) else [user])}
    return any(reader.op == "output" or _is_kernel(reader) for reader in readers)


def _is_kernel(node: Any) -> bool:
    return _is_launch(node) or is_te(node.target) or node.target in (torch.ops.aten.mm.default,)


def _is_launch(node: Any) -> bool:
    return isinstance(node, Node) and str(node.target).startswith("triton_kernel_wrapper_")


def _is_view(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and bool(node.target.is_view)


def _bytes(node: Node) -> int:
    return sum(v.numel() * v.element_size() for v in tree_leaves(node.meta["val"]) if isinstance(v, torch.Tensor))
