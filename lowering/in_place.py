"""Results written into the memory of an argument that is read for the last time there.

Inductor reuses a buffer for a kernel of ours only once the kernel before it is done with it. Where a kernel can take its
argument's place while it reads it, its launch is traced as one that writes that argument, of which Inductor makes no copy
if nothing reads it later.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_functional
from torch.fx import Node

from te_dynamo.dialect import is_te
from te_dynamo.dialect.gemm import gemm_add
from te_dynamo.dialect.swiglu import swiglu_backward_quantize, swiglu_backward_quantize_halves
from te_dynamo.kernels.activation.swiglu_in_place import (
    COLUMNS_MULTIPLE,
    MOST_COLUMNS,
    swiglu_backward_quantize_in_place,
)
from te_dynamo.kernels.gemm.add import adds_in_launch, gemm_add_in_place, is_aligned
from te_dynamo.quantized.quantizers import Float8CurrentScalingQuantizer

__all__ = ["launches_in_place", "sum_fits_addend"]

_aten = torch.ops.aten
_SAME_MEMORY = {
    _aten._unsafe_view.default,
    _aten.clone.default,
    _aten._to_copy.default,
    torch.ops.prims.convert_element_type.default,
}
"""Operations that torch does not call views, of which Inductor may make none."""


def launches_in_place(node: Node) -> Callable[..., Any] | None:
    """The launches of `node` that overwrite one of its arguments, as a function of its arguments; None where that must be kept, or
    cannot hold the result."""
    if node.target is gemm_add:
        return gemm_add_in_place if sum_fits_addend(node) else None
    return _swiglu_backward_in_place(node)


def sum_fits_addend(node: Node) -> bool:
    """Whether te.gemm_add may write its result to the addend's memory."""
    a, b, addend = (node.args[i] for i in (0, 2, 5))
    assert isinstance(a, Node) and isinstance(b, Node) and isinstance(addend, Node)
    value = addend.meta["val"]
    return (
        value.is_contiguous()
        and is_aligned(value)
        and adds_in_launch(a.meta["val"], b.meta["val"], value.dtype, bool(node.args[7]))
        and _read_for_the_last_time(addend, node)
    )


def _swiglu_backward_in_place(node: Node) -> Callable[..., list[torch.Tensor]] | None:
    """The launcher that writes the gradients of both halves into dy's memory; None where there is none."""
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
    """Whether the graph made the memory of `tensor`, and nothing but `reader`, once, reads it then or later.

    It is told by the nodes, because the storages of their values change from pass to pass.
    """
    made = tensor
    while _shares_memory(made):
        made = made.args[0]  # type: ignore[assignment]
        if not isinstance(made, Node):
            return False
    if not _makes_memory(made):
        return False
    names = list(_names_of(made))
    here = [name for name in names if reader in name.users]
    return here == [tensor] and all(user is reader or user < reader for name in names for user in name.users)


def _names_of(made: Node) -> Iterator[Node]:
    """The nodes whose memory is, or may be, that of `made`."""
    yield made
    for user in made.users:
        if _shares_memory(user):
            yield from _names_of(user)


def _shares_memory(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and (node.target.is_view or node.target in _SAME_MEMORY)


def _makes_memory(node: Node) -> bool:
    """Whether a node's result is memory of its own: of a call that is no view and writes nothing in place."""
    target: Any = node.target
    if target is operator.getitem:
        target = node.args[0].target  # type: ignore[union-attr]
        if target is triton_kernel_wrapper_functional:
            return True
        return is_te(target) or (_is_functional(target) and target.namespace == "aten")
    return _is_functional(target)


def _is_functional(target: Any) -> bool:
    """Whether an operation's results share no memory with its arguments, as far as its schema says."""
    return (
        isinstance(target, torch._ops.OpOverload)
        and not target.is_view
        and not target._schema.is_mutable
        and all(result.alias_info is None for result in target._schema.returns)
    )
