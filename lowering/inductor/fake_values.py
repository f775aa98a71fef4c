"""The fake values of the nodes that lowering puts into a graph are right, and torch is told so.

After the last custom pass torch computes the value of every node that is new, or has new arguments, once more, by a call of its
operation on fakes: that took twice as long as all that lowering does. What lowering puts in has its value from the trace that it is a
copy of. Such a node is computed again all the same where what it reads has got another value, or where a later pass changes it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

from torch.fx import Node

from te_dynamo._compat import nodes_of_updater

__all__ = ["trust_lowered_values", "values_are_right"]

_RIGHT_FOR = "te_value_is_right_for"
"""In a node's meta: the (target, args, kwargs) that its value belongs to, the node's own objects."""


def values_are_right(nodes: Iterable[Node]) -> None:
    """Says of nodes that their values are those of their arguments as they are now."""
    for node in nodes:
        node.meta[_RIGHT_FOR] = (node.target, node.args, node.kwargs)


@functools.cache
def trust_lowered_values() -> None:
    """Has torch keep such values; once a process. Where torch remembers otherwise what it has computed, it computes all of them."""
    from torch._inductor.fx_utils import FakeTensorUpdater

    update = FakeTensorUpdater.incremental_update

    @functools.wraps(update)
    def incremental_update(self: Any) -> Any:
        if hasattr(self, "hash_node") and hasattr(self, "processed_hashes"):
            right = (node for node in nodes_of_updater(self) if _is_right(node))
            self.processed_hashes.update(self.hash_node(node) for node in right)
        return update(self)

    FakeTensorUpdater.incremental_update = incremental_update  # type: ignore[method-assign]


def _is_right(node: Node) -> bool:
    target, args, kwargs = node.meta.get(_RIGHT_FOR, (None, None, None))
    return target is node.target and args is node.args and kwargs is node.kwargs
