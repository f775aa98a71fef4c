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

from te_dynamo.operations import types
from te_dynamo.operations.basic.extra import AddExtraInput, check_same_shape
from te_dynamo.operations.basic.linear import BasicLinear
from te_dynamo.operations.basic.shape import ConstantScale
from te_dynamo.operations.op import FusedOperation, FusibleOperation
from te_dynamo.operations.saves import FuserSavesAll
from te_dynamo.operations.window import sliding_window
from te_dynamo.recipe import Recipe


class ForwardLinearScaleAdd(FuserSavesAll, FusedOperation):
    """y [..., N] = scale * (x [..., K] @ weight [N, K]^T) + extra [..., N]."""

    def fuser_forward_compute(
        self,
        input: torch.Tensor,
        params: Sequence[types.Params],
        extra_inputs: Sequence[types.Params],
        *,
        requires_grad: Any,
        **_: Any,
    ) -> types.FuserForward:
        linear, scale, _add = self.ops
        assert isinstance(linear, BasicLinear) and isinstance(scale, ConstantScale)
        (extra,) = extra_inputs[-1]
        product, saved = linear.forward(input, params[0][0], None, requires_grad[0])
        check_same_shape(product.shape, extra.shape)
        output = torch.add(extra, product, alpha=scale.scale).to(input.dtype)
        return output, [(), (), ()], [saved, [], []]


def fuse_linear_scale_add(ops: Sequence[FusibleOperation], *, recipe: Optional[Recipe]) -> list[FusibleOperation]:
    """BasicLinear, ConstantScale, AddExtraInput -> ForwardLinearScaleAdd."""
    return sliding_window(ops, (BasicLinear, ConstantScale, AddExtraInput), ForwardLinearScaleAdd)
