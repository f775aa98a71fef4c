"""`te.layer_norm_modulate`: a LayerNorm whose weight and bias are computed for each sample (adaLN), alone and with a quantized result.

Backward is written in aten operations, as that of the other norms (norm.py).
"""

from typing import Any, Optional

import torch

from te_dynamo.dialect.define import te_op
from te_dynamo.dialect.fakes import like, quantized, row_statistic
from te_dynamo.dialect.norm import layer_norm_gradients
from te_dynamo.dialect.quantize import takes_quantizer
from te_dynamo.kernels.norm import modulate as kernels
from te_dynamo.quantized.quantizers import Quantizer


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    x, weight, bias, _, ctx.zero_centered, _ = inputs
    _, mean, rstd = output
    ctx.bias_dtype = bias.dtype
    ctx.save_for_backward(x, weight, mean, rstd)
    ctx.mark_non_differentiable(mean, rstd)


def _backward(ctx: Any, dy: torch.Tensor, *statistics: Any) -> tuple[Any, ...]:
    """dx as of a LayerNorm with that weight; dw, dbias = sum of dy * xhat, of dy over the rows of each sample."""
    x, weight, mean, rstd = ctx.saved_tensors
    needs = ctx.needs_input_grad
    scale = weight.to(torch.float32) + (1.0 if ctx.zero_centered else 0.0)
    dx = layer_norm_gradients(dy, x, scale, mean, rstd, None, (needs[0], False, False))[0]
    dweight = dbias = None
    dy32, inner = dy.to(torch.float32), list(range(1, x.dim() - 1))
    if needs[1]:
        mean, rstd = (statistic.view(*x.shape[:-1], 1) for statistic in (mean, rstd))
        xhat = (x.to(torch.float32) - mean) * rstd
        dweight = (dy32 * xhat).sum(inner, keepdim=True).to(weight.dtype)
    if needs[2]:
        dbias = dy32.sum(inner, keepdim=True).to(ctx.bias_dtype)
    return dx, dweight, dbias, None, None, None


@te_op(
    reference=kernels.layer_norm_modulate_reference,
    kernel=kernels.layer_norm_modulate,
    setup_context=_setup,
    backward=_backward,
)
def layer_norm_modulate(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    zero_centered: bool,
    dtype: Optional[torch.dtype] = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(y, mean, rstd): y = (x - mean) * rsqrt(var + eps) * w + bias; mean and rstd fp32 (rows,).

    x: [B, .., K], of three dimensions or more. weight, bias: [B, 1, .., K]. w = weight, or 1 + weight when zero_centered.
    dtype: of y, x's by default.
    """
    return like(x, dtype), row_statistic(x), row_statistic(x)


@te_op(
    reference=takes_quantizer(kernels.layer_norm_modulate_quantize_reference),
    kernel=takes_quantizer(kernels.layer_norm_modulate_quantize),
)
def layer_norm_modulate_quantize(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    zero_centered: bool,
    quantizer: Quantizer,
    keep_output: bool,
    dtype: Optional[torch.dtype] = None,
    quantized_dtype: Optional[torch.dtype] = None,
) -> list[torch.Tensor]:
    """[y if keep_output, mean, rstd, *buffers]: (y, mean, rstd) = te.layer_norm_modulate(..., dtype), buffers = te.quantize(y.to(quantized_dtype))."""
    return ([like(x, dtype)] if keep_output else []) + [row_statistic(x), row_statistic(x)] + quantized(x, quantizer)
