"""Forward: scale and sum in one pass over the linear's output.

    before   BasicLinear    h = x @ weight^T         GEMM, writes h
             ConstantScale  z = h * scale            reads h, writes z
             AddExtraInput  y = z + extra            reads z and extra, writes y
    after    ForwardLinearScaleAdd
                            h = x @ weight^T         GEMM
                            y = extra + scale * h    reads h and extra, writes y

The sum is rounded once. Without the fusion, z is rounded before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional

import torch

from te_dynamo.operations.basic.extra import AddExtraInput, check_same_shape
from te_dynamo.operations.basic.linear import BasicLinear
from te_dynamo.operations.basic.shape import ConstantScale
from te_dynamo.operations.context import OperationContext
from te_dynamo.operations.op import FusedOperation, FusibleOperation, Params, Saved
from te_dynamo.operations.windows import sliding_window
from te_dynamo.recipe import Recipe

__all__ = ["ForwardLinearScaleAdd", "fuse_linear_scale_add"]


class ForwardLinearScaleAdd(FusedOperation):
    """y [..., N] = scale * (x [..., K] @ weight [N, K]^T) + extra [..., N]."""

    def fuser_forward_compute(
        self,
        input: torch.Tensor,
        params: Sequence[Params],
        extra_inputs: Sequence[Params],
        *,
        requires_grad: Any,
        **_: Any,
    ) -> tuple[torch.Tensor, list[Params], list[Saved]]:
        linear, scale, _add = self.ops
        assert isinstance(linear, BasicLinear) and isinstance(scale, ConstantScale)
        (extra,) = extra_inputs[-1]
        product, saved = linear.forward(input, params[0][0], None, requires_grad[0])
        check_same_shape(product.shape, extra.shape)
        output = torch.add(extra, product, alpha=scale.scale).to(input.dtype)
        return output, [(), (), ()], [saved, [], []]

    def fuser_forward_save_ctx(self, ctxs: Sequence[OperationContext], tensors_to_save: Sequence[Saved]) -> None:
        for ctx, tensors in zip(ctxs, tensors_to_save, strict=True):
            ctx.save_for_backward(*tensors)


def fuse_linear_scale_add(ops: Sequence[FusibleOperation], *, recipe: Optional[Recipe]) -> list[FusibleOperation]:
    """BasicLinear, ConstantScale, AddExtraInput -> ForwardLinearScaleAdd."""
    return sliding_window(ops, (BasicLinear, ConstantScale, AddExtraInput), ForwardLinearScaleAdd)
