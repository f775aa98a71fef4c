"""Results written into the memory of an argument that is read for the last time there.

Inductor reuses a buffer for a kernel of ours only once the kernel before it is done with it. Where a kernel can take its
argument's place while it reads it, its launch is traced as one that writes that argument, of which Inductor makes no copy
if nothing reads it later.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from te_dynamo.dialect.gated import gated_backward, gated_backward_quantize, gated_backward_quantize_halves
from te_dynamo.dialect.gemm import Gemm, choice_for, gemm
from te_dynamo.dialect.memory import may_be_overwritten
from te_dynamo.kernels.activation.gated import gated_backward as run_gated_backward
from te_dynamo.kernels.activation.gated_in_place import (
    COLUMNS_MULTIPLE,
    MOST_COLUMNS,
    gated_backward_quantize_in_place,
)
from te_dynamo.kernels.gemm.multiply import is_aligned, multiply
from te_dynamo.quantized.quantizers import Quantizer


def launches_in_place(node: Node) -> Callable[..., Any] | None:
    """The launches of `node` that overwrite one of its arguments, as a function of its arguments; None where that must be kept, or
    cannot hold the result."""
    if node.target is gemm:
        return _run_sum if sum_fits_addend(node) else None
    if node.target is gated_backward:
        places = [_holds_a_gradient(node.args[index], node) for index in (0, 2)]
        return _runs_gradients(*places) if any(places) else None
    return _gated_backward_in_place(node)


def _run_sum(*arguments: Any) -> torch.Tensor:
    request = Gemm(*arguments).request()
    return multiply(request, out=request.addend)


def sum_fits_addend(node: Node) -> bool:
    """Whether a te.gemm has an addend, and may write its result to the addend's memory."""
    addend: Any = Gemm.of(node).addend
    if addend is None:
        return False
    value = addend.meta["val"]
    return (
        value.is_contiguous()
        and is_aligned(value)
        and choice_for(node, "add").fused
        and may_be_overwritten(addend, node)
    )


@functools.cache  # a trace is shared by nodes of one launcher
def _runs_gradients(over_dy: bool, over_up: bool) -> Callable[..., list[torch.Tensor]]:
    return lambda *arguments: [*run_gated_backward(*arguments, over_dy, over_up)]


def _holds_a_gradient(given: Any, node: Node) -> bool:
    """Whether te.gated_backward may write a gradient over an argument: each value in the place of one that its program has read."""
    value = given.meta["val"]
    return value.is_contiguous() and value.dtype == node.meta["val"][0].dtype and may_be_overwritten(given, node)


def _gated_backward_in_place(node: Node) -> Callable[..., list[torch.Tensor]] | None:
    """The launcher that writes the gradients of both halves into dy's memory; None where there is none."""
    if node.target is gated_backward_quantize and node.args[6:] == (True,):
        run: Callable[..., list[torch.Tensor]] = _run_stacked
    elif node.target is gated_backward_quantize_halves:
        run = _run_halves
    else:
        return None
    dy, _, _, _, quantizer, keep_output = node.args[:6]
    assert isinstance(dy, Node) and isinstance(quantizer, Quantizer)
    value = dy.meta["val"]
    # One pass is mended from dy.
    rows_alone = quantizer.one_scale and not quantizer.columnwise and not keep_output and not quantizer.one_pass
    fits = (
        value.element_size() == 2
        and value.is_contiguous()
        and isinstance(value.shape[-1], int)
        and value.shape[-1] % COLUMNS_MULTIPLE == 0
        and 0 < value.shape[-1] <= MOST_COLUMNS
    )
    return run if rows_alone and fits and may_be_overwritten(dy, node) else None


def _run_stacked(*arguments: Any) -> list[torch.Tensor]:
    return _run_halves(*(*arguments[:6], None))


def _run_halves(
    dy: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    kind: str,
    quantizer: Quantizer,
    keep_output: bool,
    gate_first: bool | None,
) -> list[torch.Tensor]:
    return gated_backward_quantize_in_place(dy, gate, up, kind, quantizer.form(), gate_first)
