"""Backward: an activation's gradient, the bias gradient and the quantization of dy for the linear before, in one operation.

    before   GELU          dz = dgelu(dy, z)                         writes dz in bf16
             Bias          dbias = sum of dz                         reads dz
             BasicLinear   te.quantize(dz)                           reads dz, twice
                           dx = dz @ weight,  dweight = dz^T @ x
    after    BackwardActivationBias
                           dbias, buffers of dz = te.activation_backward_quantize(dy, z)
                           dx = dz @ weight,  dweight = dz^T @ x

dz is never written in bf16. The Bias may be missing. The activation is one of te.activation's, and the linear wants its dy in FP8 with
one scale a tensor: the kernel writes nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional

import torch

from te_dynamo.dialect.linear import backward_products, grad_output_quantizer
from te_dynamo.operations import types
from te_dynamo.operations.basic.linear import BasicLinear, Bias
from te_dynamo.operations.context import OperationContext
from te_dynamo.operations.fused.backward_chain import backward_chain
from te_dynamo.operations.fused.quantized import DIALECT, activation_gradient_quantized
from te_dynamo.operations.op import FusedOperation, FusibleOperation
from te_dynamo.operations.window import sliding_window
from te_dynamo.recipe import Recipe


class BackwardActivationBias(FusedOperation):
    """dx [..., K], dweight [N, K] and dbias [N] of y = f(x @ weight^T + bias) from dy [..., N] and z, the input of f."""

    def fuser_backward(
        self, ctxs: Sequence[OperationContext], grad_output: torch.Tensor, grad_extra_outputs: Any
    ) -> types.FuserBackward:
        linear, activation = self.ops[0], self.ops[-1]
        assert isinstance(linear, BasicLinear)
        if not ctxs[0].requires_grad.any():
            return backward_chain(self.ops, ctxs, grad_output, grad_extra_outputs)
        args = linear.backward_args(ctxs[0])
        (z,) = ctxs[-1].saved_tensors
        assert z is not None
        needs_bias = len(self.ops) == 3 and ctxs[1].requires_grad.params[0]
        sums, buffers = activation_gradient_quantized(
            activation, grad_output, z.contiguous(), grad_output_quantizer(args), needs_bias
        )
        dx, dweight = backward_products(args, buffers)
        if dx is not None and grad_output.dim() != 2:
            dx = dx.reshape(*grad_output.shape[:-1], dx.shape[-1])
        grads: list[types.Grads] = [(dweight,), *((None,) * len(op.parameters()) for op in self.ops[1:])]
        if sums is not None:
            grads[1] = (sums.to(ctxs[1].params[0].dtype),)
        return dx, grads, [() for _ in self.ops]


def fuse_activation_bias(ops: Sequence[FusibleOperation], *, recipe: Optional[Recipe]) -> list[FusibleOperation]:
    """BasicLinear (, Bias), activation -> BackwardActivationBias where the linear takes its dy in current scaling."""
    found = sliding_window(ops, (BasicLinear, Bias, DIALECT), _fused)
    return sliding_window(found, (BasicLinear, DIALECT), _fused)


def _fused(window: tuple[Any, ...]) -> Optional[FusedOperation]:
    dy = window[0].grad_output_quantizer()
    return BackwardActivationBias(window) if dy is not None and dy.fused_producers else None
