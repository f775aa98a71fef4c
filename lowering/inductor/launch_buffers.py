"""The tensors of our launches in Inductor's code: what a kernel reads is computed once, what it fills is allocated when it runs.

Inductor makes a copy of a result that it has not computed yet for each argument that it is, and a kernel without some of its outputs
is given its operand in their places: three copies for the columns of an activation's gradient.

It allocates what a launch fills where the graph does, and then makes the launch's operands, whose own operands are alive beside the
empty buffers: 224 MiB of a Llama-8B block's step with scales of blocks. Its search for the order of the smallest peak does not see
that, as it counts no result that takes the place of an operand.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def operands_once(own: Callable[..., Any], node: Any, *args: Any, **kwargs: Any) -> Any:
    """constrain_to_fx_strides, which is `own`, of a launch whose operands have been computed; anything else as it is."""
    from torch._inductor.ir import TensorBox

    if node.target is torch.ops.higher_order.triton_kernel_wrapper_mutation:
        for operand in kwargs["kwargs"].values():
            if isinstance(operand, TensorBox):
                operand.realize()
    return own(node, *args, **kwargs)


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
