"""Backward: the scale after a linear joins the scale of its quantized dy.

    before   ConstantScale  dh = dy * scale                    reads dy, writes dh
             BasicLinear    q, s = te.quantize(dh)             reads dh, twice
                            dx = q @ weight * s,  dweight = q^T @ x * s
    after    BackwardLinearScale
                            q, s = te.quantize(dy)             reads dy
                            s' = s * scale                     one number
                            dx = q @ weight * s',  dweight = q^T @ x * s'

This saves one pass over dy. It is for recipes with a per-tensor scale, because a scale for a block, or a power of two, is not one such number. dh is
not rounded before it is quantized. So where the scale is no power of two, values at a rounding boundary may round to the other side.
"""

from typing import Optional

from te_dynamo.operations.basic.linear import BasicLinear
from te_dynamo.operations.basic.shape import ConstantScale
from te_dynamo.operations.fused.joined import JoinedBackward
from te_dynamo.operations.op import FusedOperation
from te_dynamo.operations.window import Window, fusion_of_windows


class BackwardLinearScale(JoinedBackward):
    """dx [..., K] and dweight [N, K] of y = scale * (x @ weight^T) from dy [..., N]."""


@fusion_of_windows((BasicLinear, ConstantScale))
def fuse_backward_linear_scale(window: Window) -> Optional[FusedOperation]:
    """BasicLinear, ConstantScale -> BackwardLinearScale where the linear takes its dy in current scaling."""
    dy = window[0].grad_output_quantizer()
    return BackwardLinearScale(window) if dy is not None and dy.one_scale else None
