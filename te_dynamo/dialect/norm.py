"""Norms over the last dimension: `te.rms_norm`, `te.layer_norm`, each of them with a quantized result, and that with the residual stream's
addition before it.

Backward is written in aten operations: Inductor fuses it with the residual gradient that it is added to. With the addition there is none:
fusion puts it into a forward graph, whose backward reads the sum and the statistics.
"""

from collections.abc import Sequence
from typing import Any, Optional

import torch

from te_dynamo.dialect.define import te_op
from te_dynamo.dialect.fakes import like, quantized, row_statistic
from te_dynamo.dialect.quantize import takes_quantizer
from te_dynamo.kernels.norm import add
from te_dynamo.kernels.norm import norm as kernels
from te_dynamo.quantized.quantizers import Quantizer


def _keep_dims(statistic: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """A statistic of shape (rows,) as it broadcasts against x."""
    return statistic.view(*x.shape[:-1], 1)


def _sum_of_rows(values: torch.Tensor) -> torch.Tensor:
    """The sum over all dimensions but the last; a single row is its own (a sum over no dimension would be one over all)."""
    return values.sum(list(range(values.dim() - 1))) if values.dim() > 1 else values


def _rms_norm_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    x, weight, _, _, ctx.zero_centered, _ = inputs
    ctx.save_for_backward(x, weight, output[1])
    ctx.mark_non_differentiable(output[1])


def rms_norm_gradients(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: Optional[torch.Tensor],
    rstd: torch.Tensor,
    zero_centered: bool,
    needs: Sequence[bool],
) -> tuple[Optional[torch.Tensor], Optional[torch.Tensor]]:
    """(dx, dw): dx = rstd * (g - xhat * mean(g * xhat)), g = dy * w, xhat = x * rstd; dw = sum over rows of dy * xhat.

    needs: which of them; None for the others.
    """
    dy32 = dy.to(torch.float32)
    rstd = _keep_dims(rstd, x)
    xhat = x.to(torch.float32) * rstd
    g, dweight = dy32, None
    if weight is not None:
        w32 = weight.to(torch.float32)
        g = dy32 * (1.0 + w32 if zero_centered else w32)
        if needs[1]:
            dweight = _sum_of_rows(dy32 * xhat).to(weight.dtype)
    dx = None
    if needs[0]:
        dx = (rstd * (g - xhat * (g * xhat).mean(-1, keepdim=True))).to(x.dtype)
    return dx, dweight


def _rms_norm_backward(ctx: Any, dy: torch.Tensor, _: Any) -> tuple[Any, ...]:
    x, weight, rstd = ctx.saved_tensors
    return *rms_norm_gradients(dy, x, weight, rstd, ctx.zero_centered, ctx.needs_input_grad[:2]), None, None, None, None


@te_op(
    reference=kernels.rms_norm_reference,
    kernel=kernels.rms_norm,
    setup_context=_rms_norm_setup,
    backward=_rms_norm_backward,
)
def rms_norm(
    x: torch.Tensor,
    weight: Optional[torch.Tensor],
    eps: float,
    cast_before_weight: bool,
    zero_centered: bool,
    dtype: Optional[torch.dtype] = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(y, rstd): y = x * rsqrt(mean(x^2) + eps) * w; w = weight, or 1 + weight when zero_centered.

    cast_before_weight: round to x's dtype before the product with the weight, as Hugging Face's Llama does.
    rstd: fp32 (rows,). dtype: of y, x's by default.
    """
    return like(x, dtype), row_statistic(x)


def _layer_norm_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    x, weight, bias, *_ = inputs
    _, mean, rstd = output
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.save_for_backward(x, weight, mean, rstd)
    ctx.mark_non_differentiable(mean, rstd)


def layer_norm_gradients(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: Optional[torch.Tensor],
    mean: torch.Tensor,
    rstd: torch.Tensor,
    bias_dtype: Optional[torch.dtype],
    needs: Sequence[bool],
) -> tuple[Optional[torch.Tensor], Optional[torch.Tensor], Optional[torch.Tensor]]:
    """(dx, dw, db): dx = rstd * (g - mean(g) - xhat * mean(g * xhat)), g = dy * w; dw, db = sum of dy * xhat, of dy over rows.

    needs: which of them; None for the others.
    """
    dy32 = dy.to(torch.float32)
    rstd = _keep_dims(rstd, x)
    xhat = (x.to(torch.float32) - _keep_dims(mean, x)) * rstd
    g = dy32 if weight is None else dy32 * weight.to(torch.float32)
    dx = dweight = dbias = None
    if needs[0]:
        dx = (rstd * (g - g.mean(-1, keepdim=True) - xhat * (g * xhat).mean(-1, keepdim=True))).to(x.dtype)
    if weight is not None and needs[1]:
        dweight = _sum_of_rows(dy32 * xhat).to(weight.dtype)
    if bias_dtype is not None and needs[2]:
        dbias = _sum_of_rows(dy32).to(bias_dtype)
    return dx, dweight, dbias


def _layer_norm_backward(ctx: Any, dy: torch.Tensor, *_: Any) -> tuple[Any, ...]:
    x, weight, mean, rstd = ctx.saved_tensors
    return *layer_norm_gradients(dy, x, weight, mean, rstd, ctx.bias_dtype, ctx.needs_input_grad[:3]), None, None


@te_op(
    reference=kernels.layer_norm_reference,
    kernel=kernels.layer_norm,
    setup_context=_layer_norm_setup,
    backward=_layer_norm_backward,
)
def layer_norm(
    x: torch.Tensor,
    weight: Optional[torch.Tensor],
    bias: Optional[torch.Tensor],
    eps: float,
    dtype: Optional[torch.dtype] = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(y, mean, rstd): y = (x - mean) * rsqrt(var + eps) * weight + bias; mean and rstd fp32 (rows,). dtype: of y, x's by default."""
    return like(x, dtype), row_statistic(x), row_statistic(x)


@te_op(
    reference=takes_quantizer(kernels.rms_norm_quantize_reference),
    kernel=takes_quantizer(kernels.rms_norm_quantize),
)
def rms_norm_quantize(
    x: torch.Tensor,
    weight: Optional[torch.Tensor],
    eps: float,
    cast_before_weight: bool,
    zero_centered: bool,
    quantizer: Quantizer,
    keep_output: bool,
    dtype: Optional[torch.dtype] = None,
    quantized_dtype: Optional[torch.dtype] = None,
) -> list[torch.Tensor]:
    """[y if keep_output, rstd, *buffers]: (y, rstd) = te.rms_norm(..., dtype), buffers = te.quantize(y.to(quantized_dtype))."""
    return ([like(x, dtype)] if keep_output else []) + [row_statistic(x)] + quantized(x, quantizer)


@te_op(
    reference=takes_quantizer(kernels.layer_norm_quantize_reference),
    kernel=takes_quantizer(kernels.layer_norm_quantize),
)
def layer_norm_quantize(
    x: torch.Tensor,
    weight: Optional[torch.Tensor],
    bias: Optional[torch.Tensor],
    eps: float,
    quantizer: Quantizer,
    keep_output: bool,
    dtype: Optional[torch.dtype] = None,
    quantized_dtype: Optional[torch.dtype] = None,
) -> list[torch.Tensor]:
    """[y if keep_output, mean, rstd, *buffers]: (y, mean, rstd) = te.layer_norm(..., dtype), buffers = te.quantize(y.to(quantized_dtype))."""
    return ([like(x, dtype)] if keep_output else []) + [row_statistic(x), row_statistic(x)] + quantized(x, quantizer)


@te_op(
    reference=takes_quantizer(add.add_rms_norm_quantize_reference),
    kernel=takes_quantizer(add.add_rms_norm_quantize),
)
def add_rms_norm_quantize(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: Optional[torch.Tensor],
    eps: float,
    cast_before_weight: bool,
    zero_centered: bool,
    quantizer: Quantizer,
    keep_output: bool,
    dtype: Optional[torch.dtype] = None,
    quantized_dtype: Optional[torch.dtype] = None,
) -> list[torch.Tensor]:
    """[h, *te.rms_norm_quantize(h, ...)]: h = x + residual, two tensors of one shape, in the wider of their dtypes."""
    h = like(x, torch.promote_types(x.dtype, residual.dtype))
    results = [h] + ([like(h, dtype)] if keep_output else [])
    return results + [row_statistic(x)] + quantized(x, quantizer)


@te_op(
    reference=takes_quantizer(add.add_layer_norm_quantize_reference),
    kernel=takes_quantizer(add.add_layer_norm_quantize),
)
def add_layer_norm_quantize(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: Optional[torch.Tensor],
    bias: Optional[torch.Tensor],
    eps: float,
    quantizer: Quantizer,
    keep_output: bool,
    dtype: Optional[torch.dtype] = None,
    quantized_dtype: Optional[torch.dtype] = None,
) -> list[torch.Tensor]:
    """[h, *te.layer_norm_quantize(h, ...)]: h = x + residual, two tensors of one shape, in the wider of their dtypes."""
    h = like(x, torch.promote_types(x.dtype, residual.dtype))
    results = [h] + ([like(h, dtype)] if keep_output else [])
    return results + [row_statistic(x), row_statistic(x)] + quantized(x, quantizer)
