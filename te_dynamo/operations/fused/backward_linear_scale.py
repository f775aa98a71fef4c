"""Backward: the scale after a linear joins the scale of its quantized dy.

    before   ConstantScale  dh = dy * scale                    reads dy, writes dh
             BasicLinear    q, s = te.quantize(dh)             reads dh, twice
                            dx = q @ weight * s,  dweight = q^T @ x * s
    after    BackwardLinearScale
                            q, s = te.quantize(dy)             reads dy
                            s' = s * scale                     one number
                            dx = q @ weight * s',  dweight = q^T @ x * s'

This saves one pass over dy. It is for recipes with one scale a tensor, because a scale for a block, or a power of two, is not one such number. dh is
not rounded before it is quantized. So where the scale is no power of two, values at a rounding boundary may round to the other side.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional

from te_dynamo.operations.basic.linear import BasicLinear
from te_dynamo.operations.basic.shape import ConstantScale
from te_dynamo.operations.fused.joined import JoinedBackward
from te_dynamo.operations.op import FusedOperation, FusibleOperation
from te_dynamo.operations.window import sliding_window
from te_dynamo.recipe import Recipe


class BackwardLinearScale(JoinedBackward):
    """dx [..., K] and dweight [N, K] of y = scale * (x @ weight^T) from dy [..., N]."""


def fuse_backward_linear_scale(ops: Sequence[FusibleOperation], *, recipe: Optional[Recipe]) -> list[FusibleOperation]:
    """BasicLinear, ConstantScale -> BackwardLinearScale where the linear takes its dy in current scaling."""
    return sliding_window(ops, (BasicLinear, ConstantScale), _fused)


def _fused(window: tuple[Any, ...]) -> Optional[FusedOperation]:
    dy = window[0].grad_output_quantizer()
    return BackwardLinearScale(window) if dy is not None and dy.one_scale else None
