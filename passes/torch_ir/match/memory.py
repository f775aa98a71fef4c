"""Which memory the tensors of a graph lie in: noted once, before anything is rewritten.

Dynamo's fake tensors share a storage exactly where the real ones do, so each node notes the storages of its own. That holds for the graph
that Dynamo made. The result of a te operation is a new fake with a storage of its own, while the user's views of what it replaced keep
the old one: so a node that takes another's place takes over what was noted of that one, and no storage is compared afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

Memory = frozenset[Any]
"""The storages that tensors lie in; none of what is no tensor."""

CHANGED_BY = "te_changed_by"
"""Of a node whose tensor gets another size, strides or storage: what changes it. Its fake value is that tensor at the end."""

_KEY = "te_memory"
_ANY: Memory = frozenset(["any"])
"""Of what cannot be told: it may share memory with every tensor."""


def memory_of(node: fx.Node) -> Memory:
    """What was noted of a node's tensors."""
    return node.meta.get(_KEY, _ANY)


def share(a: Memory, b: Memory) -> bool:
    """Whether tensors that lie there may share memory."""
    return bool(a and b and (a & b or (a | b) & _ANY))


def note_graph(graph: fx.Graph) -> None:
    """Notes the memory of all nodes, as Dynamo's fake tensors have it."""
    for node in graph.nodes:
        node.meta[_KEY] = storages_of(node.meta["example_value"]) if "example_value" in node.meta else _ANY


def note_body(graph: fx.Graph, given: dict[fx.Node, Iterable[Any]]) -> None:
    """Adds to the memory of a body's nodes that of the operands that its placeholders stand for.

    given: placeholder -> what each call passes for it.
    """
    outside: dict[Any, Memory] = {}
    for placeholder, operands in given.items():
        passed = memory_of(placeholder).union(
            *(memory_of(operand) for operand in operands if isinstance(operand, fx.Node))
        )
        outside |= {storage: outside.get(storage, passed) | passed for storage in memory_of(placeholder)}
    for node in graph.nodes:
        node.meta[_KEY] = memory_of(node).union(*(outside.get(storage, ()) for storage in memory_of(node)))


def note_new(node: fx.Node) -> None:
    """Notes the memory of a node that was added: its operands' where its fake is a view of one of theirs, else its own."""
    own = storages_of(node.meta["example_value"])
    views = [
        memory_of(operand)
        for operand in node.all_input_nodes
        if share(own, storages_of(operand.meta.get("example_value")))
    ]
    node.meta[_KEY] = own.union(*views)


def take_over(node: fx.Node, new: fx.Node) -> None:
    """`new` takes the place of `node`: what views of that one share memory with, it does too."""
    new.meta[_KEY] = memory_of(new) | memory_of(node)


def storages_of(value: Any) -> Memory:
    leaves = [value] if isinstance(value, torch.Tensor) else tree_leaves(value)
    return frozenset().union(*(_of_tensor(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)))


def _of_tensor(tensor: torch.Tensor) -> Memory:
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        return frozenset().union(*(storages_of(getattr(tensor, name)) for name in names))
    try:
        return frozenset([StorageWeakRef(tensor.untyped_storage())])
    except (RuntimeError, NotImplementedError):
        return _ANY
