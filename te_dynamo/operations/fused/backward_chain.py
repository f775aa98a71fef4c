"""The backward of basic operations one after another: what a fused backward falls back to where its kernel has nothing to do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from te_dynamo.operations import types
from te_dynamo.operations.context import OperationContext
from te_dynamo.operations.op import BasicOperation


def backward_chain(
    ops: Sequence[BasicOperation],
    ctxs: Sequence[OperationContext],
    grad_output: torch.Tensor,
    grad_extra_outputs: Sequence[types.Grads],
) -> types.FuserBackward:
    """What `fuser_backward` of the operations gives, each run by itself; those before the last that needs a gradient are left out."""
    grad: Any = grad_output
    params: list[types.Grads] = [(None,) * len(ctx.params) for ctx in ctxs]
    extra_inputs: list[types.Grads] = [(None,) * len(ctx.extra_inputs) for ctx in ctxs]
    for i in reversed(range(len(ops))):
        if not ctxs[i].requires_grad.any():
            return None, params, extra_inputs
        one = slice(i, i + 1)
        grad, params[one], extra_inputs[one] = ops[i].fuser_backward(ctxs[one], grad, grad_extra_outputs[one])
    return grad, params, extra_inputs
