"""Forward: an extra input is added into the linear's own output. The in-place AddExtraInput of Transformer Engine.

    before   BasicLinear    h = x @ weight^T         GEMM, writes h
             Bias           z = h + bias             reads h, writes z
             AddExtraInput  y = z + extra            reads z and extra, writes y
    after    ForwardLinearBiasAdd
                            y = x @ weight^T + bias  GEMM, the bias in its epilogue
                            y += extra               no second tensor

The Bias may be missing. The GEMM kernels do not accumulate into a given output, so the sum is a pass of its own, which a compiler
fuses with its neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional

import torch

from te_dynamo.operations.basic.extra import AddExtraInput, check_same_shape
from te_dynamo.operations.basic.linear import BasicLinear, Bias
from te_dynamo.operations.context import OperationContext
from te_dynamo.operations.op import FusedOperation, FusibleOperation, Params, Saved
from te_dynamo.operations.windows import sliding_window
from te_dynamo.recipe import Recipe

__all__ = ["ForwardLinearBiasAdd", "fuse_linear_bias_add"]


class ForwardLinearBiasAdd(FusedOperation):
    """y [..., N] = x [..., K] @ weight [N, K]^T + bias [N] + extra [..., N], rounded to x's dtype before extra is added."""

    def fuser_forward_compute(
        self,
        input: torch.Tensor,
        params: Sequence[Params],
        extra_inputs: Sequence[Params],
        *,
        requires_grad: Any,
        **_: Any,
    ) -> tuple[torch.Tensor, list[Params], list[Saved]]:
        linear, (extra,) = self.ops[0], extra_inputs[-1]
        assert isinstance(linear, BasicLinear)
        bias = params[1][0] if len(self.ops) == 3 else None
        output, saved = linear.forward(input, params[0][0], bias, requires_grad[0])
        check_same_shape(output.shape, extra.shape)
        return output.add_(extra), [() for _ in self.ops], [saved, *([] for _ in self.ops[1:])]

    def fuser_forward_save_ctx(self, ctxs: Sequence[OperationContext], tensors_to_save: Sequence[Saved]) -> None:
        for ctx, tensors in zip(ctxs, tensors_to_save, strict=True):
            ctx.save_for_backward(*tensors)


def fuse_linear_bias_add(ops: Sequence[FusibleOperation], *, recipe: Optional[Recipe]) -> list[FusibleOperation]:
    """BasicLinear (, Bias), AddExtraInput -> ForwardLinearBiasAdd."""
    found = sliding_window(ops, (BasicLinear, Bias, AddExtraInput), ForwardLinearBiasAdd)
    return sliding_window(found, (BasicLinear, AddExtraInput), ForwardLinearBiasAdd)
