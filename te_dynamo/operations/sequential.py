"""`te_dynamo.Sequential`: a module that owns the parameters of a list of operations and runs what the fuser makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, Optional

import torch

from te_dynamo.errors import TeError
from te_dynamo.operations.fuser import FusedOps, OperationFuser
from te_dynamo.operations.op import BasicOperation, FusibleOperation, Params
from te_dynamo.operations.run import Call, Context, first_needing_grad, run_backward, run_forward
from te_dynamo.recipe import Recipe

__all__ = ["Sequential"]


class Sequential(torch.nn.Module):
    """Operations one after another, with their parameters.

    ops: the operations; a fused one counts as its basic operations. recipe: that of the operations without one of their own, None
    for high precision. fusions: False runs every operation by itself. device, dtype: of the parameters.

    `seq(x, *extra_inputs)` gives y, or (y, *extra_outputs) where an operation makes one. Parameters are called "0.weight" after the
    position of their operation. One autograd node stands for all of it.
    """

    def __init__(
        self,
        *ops: FusibleOperation,
        recipe: Optional[Recipe] = None,
        fusions: bool = True,
        device: Optional[torch.device | str] = None,
        dtype: Optional[torch.dtype] = None,
    ) -> None:
        super().__init__()
        self.fuser = OperationFuser(ops, recipe=recipe, fusions=fusions)
        self._names: list[tuple[str, str]] = []
        for i, op in enumerate(self.fuser.basic_ops):
            holder = torch.nn.Module()
            for parameter in op.parameters():
                value = torch.empty(parameter.shape, device=device, dtype=dtype)
                with torch.no_grad():
                    parameter.init(value)
                holder.register_parameter(parameter.name, torch.nn.Parameter(value))
                self._names.append((str(i), parameter.name))
            self.add_module(str(i), holder)

    @property
    def ops(self) -> tuple[BasicOperation, ...]:
        """The basic operations."""
        return self.fuser.basic_ops

    def forward(self, input: torch.Tensor, *extra_inputs: torch.Tensor) -> Any:
        params = [getattr(getattr(self, child), name) for child, name in self._names]
        _check_extra_inputs(self.ops, extra_inputs)
        grad = torch.is_grad_enabled()
        flags = [grad and tensor.requires_grad for tensor in (input, *params, *extra_inputs)]
        call = Call.of(self.ops, flags, self.training)
        fused = self.fuser.fuse(first_needing_grad(call))
        output, *extra_outputs = _Run.apply(call, fused, input, *params, *extra_inputs)
        return (output, *extra_outputs) if extra_outputs else output


def _check_extra_inputs(ops: Sequence[BasicOperation], extra_inputs: Sequence[Any]) -> None:
    wanted = [type(op).__name__ for op in ops for _ in range(op.num_extra_inputs)]
    if len(wanted) != len(extra_inputs):
        raise TeError(
            f"Sequential: expected {len(wanted)} extra inputs ({', '.join(wanted) or 'none'}), got {len(extra_inputs)}"
        )


def _split(ops: Sequence[BasicOperation], tensors: Sequence[torch.Tensor]) -> tuple[list[Params], list[Params]]:
    """Parameters, then extra inputs, as one tuple for each operation."""
    given = iter(tensors)
    params = [tuple(next(given) for _ in op.parameters()) for op in ops]
    return params, [tuple(next(given) for _ in range(op.num_extra_inputs)) for op in ops]


class _Run(torch.autograd.Function):
    """All operations of one call: the only place that touches autograd's context."""

    @staticmethod
    def forward(func_ctx: Any, call: Call, fused: FusedOps, input: torch.Tensor, *tensors: torch.Tensor) -> Any:  # type: ignore[override]
        params, extra_inputs = _split(call.ops, tensors)
        output, extra_outputs, ctxs = run_forward(fused.forward, call, input, params, extra_inputs)
        func_ctx.call, func_ctx.fused = call, fused
        func_ctx.set_materialize_grads(False)
        func_ctx.save_for_backward(*chain.from_iterable(ctx.saved_tensors for ctx in ctxs))
        func_ctx.ctxs = [(ctx.with_saved(()), len(ctx.saved_tensors)) for ctx in ctxs]
        func_ctx.output = output.shape, output.dtype, output.device
        return (output, *chain.from_iterable(extra_outputs))

    @staticmethod
    def backward(func_ctx: Any, grad_output: Optional[torch.Tensor], *grad_extras: Any) -> Any:  # type: ignore[override]
        call, fused = func_ctx.call, func_ctx.fused
        saved = iter(func_ctx.saved_tensors)
        ctxs: list[Context] = [ctx.with_saved([next(saved) for _ in range(n)]) for ctx, n in func_ctx.ctxs]
        if grad_output is None:
            shape, dtype, device = func_ctx.output
            grad_output = torch.zeros(shape, dtype=dtype, device=device)
        given = iter(grad_extras)
        extras = [tuple(next(given) for _ in range(op.num_extra_outputs)) for op in call.ops]
        with torch.no_grad():
            grads = run_backward(fused.backward, call, ctxs, grad_output, extras)
        return None, None, grads[0], *chain.from_iterable(grads[1]), *chain.from_iterable(grads[2])
