"""Buffers that Inductor allocates when a kernel fills them.

A launch of ours writes to tensors that the graph allocates before it. Between the two Inductor puts the pointwise kernels that make the
launch's operands, whose own operands are then alive beside the empty buffers: 224 MiB of a Llama-8B block's step with scales of blocks.
Inductor's search for the order of the smallest peak does not see it, as it counts no result that takes the place of an operand.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def allocate_late(own: Callable[..., list[Any]], *args: Any, **kwargs: Any) -> list[Any]:
    """The scheduler's nodes in the order of reorder_for_peak_memory, which is `own`, but each empty buffer right before its first reader."""
    from torch._inductor.scheduler import NopKernelSchedulerNode

    empty: dict[str, Any] = {}
    order = []
    for node in own(*args, **kwargs):
        if isinstance(node, NopKernelSchedulerNode) and not node.read_writes.reads:
            empty.update(dict.fromkeys(node.get_buffer_names(), node))
            continue
        order += [empty.pop(dep.name) for dep in node.read_writes.reads if dep.name in empty]
        order.append(node)
    return order + list(empty.values())
