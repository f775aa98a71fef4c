"""Forward: an extra input is added in the linear's GEMM. It is the in-place AddExtraInput of Transformer Engine.

    before   BasicLinear    h = x @ weight^T         GEMM, writes h
             Bias           z = h + bias             reads h, writes z
             AddExtraInput  y = z + extra            reads z and extra, writes y
    after    ForwardLinearBiasAdd
                            y = x @ weight^T + bias + extra      GEMM, bias and extra in its epilogue

The Bias may be missing. y is a tensor of its own: the user's extra input keeps its values. In other recipes than current scaling the
GEMM has no such epilogue, and the sum is a pass of its own over its result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional

import torch

from te_dynamo.operations import types
from te_dynamo.operations.basic.extra import AddExtraInput, check_same_shape
from te_dynamo.operations.basic.linear import BasicLinear, Bias
from te_dynamo.operations.op import FusedOperation, FusibleOperation
from te_dynamo.operations.saves import FuserSavesAll
from te_dynamo.operations.window import sliding_window
from te_dynamo.recipe import Recipe


class ForwardLinearBiasAdd(FuserSavesAll, FusedOperation):
    """y [..., N] = x [..., K] @ weight [N, K]^T + bias [N] + extra [..., N], rounded to x's dtype before extra is added."""

    def fuser_forward_compute(
        self,
        input: torch.Tensor,
        params: Sequence[types.Params],
        extra_inputs: Sequence[types.Params],
        *,
        requires_grad: Any,
        **_: Any,
    ) -> types.FuserForward:
        linear, (extra,) = self.ops[0], extra_inputs[-1]
        assert isinstance(linear, BasicLinear)
        bias = params[1][0] if len(self.ops) == 3 else None
        check_same_shape((*input.shape[:-1], linear.out_features), extra.shape)
        output, saved = linear.forward(input, params[0][0], bias, requires_grad[0], extra)
        return output, [() for _ in self.ops], [saved, *([] for _ in self.ops[1:])]


def fuse_linear_bias_add(ops: Sequence[FusibleOperation], *, recipe: Optional[Recipe]) -> list[FusibleOperation]:
    """BasicLinear (, Bias), AddExtraInput -> ForwardLinearBiasAdd."""
    found = sliding_window(ops, (BasicLinear, Bias, AddExtraInput), ForwardLinearBiasAdd)
    return sliding_window(found, (BasicLinear, AddExtraInput), ForwardLinearBiasAdd)
