"""The boundary to autograd: what the contexts of a call keep, and its backward. One for eager runs and for graphs."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from itertools import chain
from typing import Any, Optional

import torch

from te_dynamo.errors import UnsupportedError
from te_dynamo.operations import types
from te_dynamo.operations.context import OperationContext
from te_dynamo.operations.fuser import Group
from te_dynamo.operations.run import Call, run_backward


def keep(
    func_ctx: Any, call: Call, groups: Sequence[Group], ctxs: Sequence[OperationContext], output: torch.Tensor
) -> None:
    """Puts on autograd's context what `backward` reads. No tensor is kept but by save_for_backward."""
    func_ctx.set_materialize_grads(False)
    func_ctx.save_for_backward(*chain.from_iterable(ctx.saved_tensors for ctx in ctxs))
    func_ctx.ctxs = [(ctx.with_saved(()), len(ctx.saved_tensors)) for ctx in ctxs]
    func_ctx.call, func_ctx.groups = call, groups
    func_ctx.output = output.shape, output.dtype, output.device


def backward(
    func_ctx: Any, grad_output: Optional[torch.Tensor], grad_extra_outputs: Sequence[Optional[torch.Tensor]]
) -> types.FuserBackward:
    """(grad of the input, grads of the parameters, of the extra inputs), the last two an entry for each basic operation.

    Leaves autograd's context as it found it: a second backward under retain_graph=True runs the same. The gradients have no
    derivative: differentiating them raises UnsupportedError.
    """
    call = func_ctx.call
    saved = iter(func_ctx.saved_tensors)
    ctxs: list[OperationContext] = [ctx.with_saved([next(saved) for _ in range(n)]) for ctx, n in func_ctx.ctxs]
    if grad_output is None:
        shape, dtype, device = func_ctx.output
        grad_output = torch.zeros(shape, dtype=dtype, device=device)
    given = iter(grad_extra_outputs)
    extras = [tuple(next(given) for _ in range(op.num_extra_outputs)) for op in call.ops]
    # Ambient autocast would choose a dtype for each operation inside.
    device = grad_output.device
    off = torch.autocast(device.type, enabled=False) if is_autocast_on(device) else contextlib.nullcontext()
    with torch.no_grad(), off:
        grad, params, extra_inputs = run_backward(func_ctx.groups, call, ctxs, grad_output, extras)
    if not torch.is_grad_enabled():
        return grad, params, extra_inputs
    names = ", ".join(type(group.op).__name__ for group in func_ctx.groups)
    return (
        _once(names, grad),
        [tuple(_once(names, g) for g in grads) for grads in params],
        [tuple(_once(names, g) for g in grads) for grads in extra_inputs],
    )


def is_autocast_on(device: torch.device) -> bool:
    """Whether autocast is on for tensors of that device; "meta" has none."""
    return device.type != "meta" and torch.is_autocast_enabled(device.type)


def _once(names: str, grad: Optional[torch.Tensor]) -> Optional[torch.Tensor]:
    """The gradient, with a derivative that raises: under create_graph=True it would be taken for a constant otherwise."""
    return None if grad is None else _NoDerivative.apply(names, grad.detach().requires_grad_())  # type: ignore[no-any-return]


class _NoDerivative(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, names: str, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        ctx.names = names
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise UnsupportedError(
            f"the backward of {ctx.names} has no derivative: this is a double backward, which te_dynamo's operations do not "
            "support; compute what needs second derivatives with torch's own modules"
        )
