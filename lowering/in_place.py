"""Results written into the memory of an argument that is read for the last time there.

Inductor reuses a buffer for a kernel of ours only once the kernel before it is done with it. Where a kernel can take its
argument's place while it reads it, its launch is traced as one that writes that argument, of which Inductor makes no copy
if nothing reads it later.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.fx import Node
from torch.utils._pytree import tree_leaves

from te_dynamo.kernels.swiglu_in_place import COLUMNS_MULTIPLE, MOST_COLUMNS, swiglu_backward_quantize_in_place
from te_dynamo.ops.swiglu import swiglu_backward_quantize, swiglu_backward_quantize_halves
from te_dynamo.quantizers import Float8CurrentScalingQuantizer

__all__ = ["launches_in_place"]


def launches_in_place(node: Node) -> Callable[..., list[torch.Tensor]] | None:
    """The launches of `node` that overwrite its first argument, as a function of its arguments; None where it must be kept, or
    cannot hold the result."""
    if node.target is swiglu_backward_quantize and node.args[5:] == (True,):
        run: Callable[..., list[torch.Tensor]] = _run_stacked
    elif node.target is swiglu_backward_quantize_halves:
        run = _run_halves
    else:
        return None
    quantizer, keep_output = node.args[3:5]
    dy = node.args[0]
    assert isinstance(dy, Node)
    value = dy.meta["val"]
    rows_alone = isinstance(quantizer, Float8CurrentScalingQuantizer) and not quantizer.columnwise and not keep_output
    fits = (
        value.element_size() == 2
        and value.is_contiguous()
        and isinstance(value.shape[-1], int)
        and value.shape[-1] % COLUMNS_MULTIPLE == 0
        and 0 < value.shape[-1] <= MOST_COLUMNS
    )
    return run if rows_alone and fits and _read_for_the_last_time(dy, node) else None


def _run_stacked(
    dy: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    quantizer: Float8CurrentScalingQuantizer,
    keep_output: bool,
    stacked: bool,
) -> list[torch.Tensor]:
    return _run_halves(dy, gate, up, quantizer, keep_output, None)


def _run_halves(
    dy: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    quantizer: Float8CurrentScalingQuantizer,
    keep_output: bool,
    gate_first: bool | None,
) -> list[torch.Tensor]:
    return swiglu_backward_quantize_in_place(
        dy, gate, up, quantizer.dtype, quantizer.power_of_two_scale, quantizer.amax_epsilon, gate_first
    )


def _read_for_the_last_time(tensor: Node, reader: Node) -> bool:
    """Whether the graph made the memory of `tensor`, and nothing after `reader` reads it."""
    storage = tensor.meta["val"].untyped_storage()._cdata
    after = False
    for node in reader.graph.nodes:
        if node.op == "placeholder" and _uses(node, storage):
            return False
        if after and any(_uses(read, storage) for read in node.all_input_nodes):
            return False
        after = after or node is reader
    return True


def _uses(node: Node, storage: int) -> bool:
    values = (v for v in tree_leaves(node.meta.get("val")) if isinstance(v, torch.Tensor))
    return any(value.untyped_storage()._cdata == storage for value in values)
