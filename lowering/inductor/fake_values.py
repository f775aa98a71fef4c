"""The fake values of the nodes that lowering puts into a graph are right, and torch is told so.

After the last custom pass torch computes the value of every node that is new, or has new arguments, once more, by a call of its
operation on fakes: that took twice as long as all that lowering does. What lowering puts in has its value from the trace that it is a
copy of. Such a node is computed again all the same where what it reads has got another value, or where a later pass changes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch.fx import Node

from te_dynamo._compat import nodes_of_updater
from te_dynamo.torch_private.private import warn_skipped

_RIGHT_FOR = "te_value_is_right_for"
"""In a node's meta: the (target, args, kwargs) that its value belongs to, the node's own objects."""


def values_are_right(nodes: Iterable[Node]) -> None:
    """Says of nodes that their values are those of their arguments as they are now."""
    for node in nodes:
        node.meta[_RIGHT_FOR] = (node.target, node.args, node.kwargs)


def incremental_update(update: Callable[..., Any], updater: Any) -> Any:
    """FakeTensorUpdater.incremental_update, which is `update`: of the nodes whose values are right, torch is told that it knows them."""
    if hasattr(updater, "processed_hashes"):
        right = (node for node in nodes_of_updater(updater) if _is_right(node))
        updater.processed_hashes.update(updater.hash_node(node) for node in right)
    else:
        warn_skipped("torch._inductor.fx_utils.FakeTensorUpdater().processed_hashes", "time to compile")
    return update(updater)


def _is_right(node: Node) -> bool:
    target, args, kwargs = node.meta.get(_RIGHT_FOR, (None, None, None))
    return target is node.target and args is node.args and kwargs is node.kwargs
