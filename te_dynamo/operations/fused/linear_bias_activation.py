"""Forward: a bias, and the activation after it, join the linear.

    before   BasicLinear   h = x @ weight^T            GEMM, writes h
             Bias          z = h + bias                reads h, writes z
             GELU          y = gelu(z)
    after    ForwardLinearBiasActivation
                           z = x @ weight^T + bias     GEMM, the bias in its epilogue, one rounding
                           y = gelu(z)

z is what the activation's backward reads, so it is written in any case; h is not. The activation may be missing, and may be any
that has one input and no extra ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional

import torch

from te_dynamo.operations import types
from te_dynamo.operations.basic.activation import Activation
from te_dynamo.operations.basic.linear import BasicLinear, Bias
from te_dynamo.operations.context import OperationContext
from te_dynamo.operations.op import FusedOperation, FusibleOperation
from te_dynamo.operations.window import sliding_window
from te_dynamo.recipe import Recipe


class ForwardLinearBiasActivation(FusedOperation):
    """y [..., N] = f(x [..., K] @ weight [N, K]^T + bias [N]); f the identity without a third operation."""

    def fuser_forward_compute(
        self,
        input: torch.Tensor,
        params: Sequence[types.Params],
        extra_inputs: Any,
        *,
        requires_grad: Any,
        **keywords: Any,
    ) -> types.FuserForward:
        linear, _bias, *activations = self.ops
        assert isinstance(linear, BasicLinear)
        output, of_linear = linear.forward(input, params[0][0], params[1][0], requires_grad[0])
        saved: list[types.Saved] = [of_linear, []]
        for activation in activations:
            output, of_activation = activation.op_forward_compute(
                output, params[2], requires_grad=requires_grad[2], **keywords
            )
            saved.append(of_activation)
        return output, [() for _ in self.ops], saved

    def fuser_forward_save_ctx(self, ctxs: Sequence[OperationContext], tensors_to_save: Sequence[types.Saved]) -> None:
        for op, ctx, tensors in zip(self.ops, ctxs, tensors_to_save, strict=True):
            op.op_forward_save_ctx(ctx, tensors)


def fuse_linear_bias_activation(ops: Sequence[FusibleOperation], *, recipe: Optional[Recipe]) -> list[FusibleOperation]:
    """BasicLinear, Bias (, activation) -> ForwardLinearBiasActivation, the longer first."""
    found = sliding_window(ops, (BasicLinear, Bias, Activation), ForwardLinearBiasActivation)
    return sliding_window(found, (BasicLinear, Bias), ForwardLinearBiasActivation)
