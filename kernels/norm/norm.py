"""RMSNorm and LayerNorm over the last dimension, and both fused with quantization.

    rms_norm    y = x * rstd * w             rstd = 1 / sqrt(mean(x^2) + eps)
    layer_norm  y = (x - mean) * rstd * w + b      rstd = 1 / sqrt(mean((x - mean)^2) + eps)

w is weight, or 1 + weight when `zero_centered` (Gemma); with `cast_before_weight` (Hugging Face's Llama) the
product x * rstd is rounded to x's dtype before w. Arithmetic is fp32 with one rounding at the end; rstd and
mean are fp32 [rows]. kernels.py has the two launches.

dtype is that of y, x's own by default. quantized_dtype is what y is rounded to before it is quantized, dtype by default: under autocast
the residual stream reads y in fp32, and the product reads it in bf16.
"""

from __future__ import annotations

import torch

from te_dynamo.kernels.layouts.form import Form
from te_dynamo.kernels.norm.kernels import launch_rows, norm_arguments
from te_dynamo.kernels.norm.quantized import norm_quantize
from te_dynamo.kernels.quantize.current import Tile
from te_dynamo.kernels.quantize.formats import reference_of

# --- reference ----------------------------------------------------------------------------------------------


def rms_norm_reference(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    cast_before_weight: bool,
    zero_centered: bool,
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`rms_norm` in plain PyTorch."""
    value = x.to(torch.float32)
    rstd = torch.rsqrt(value.square().mean(-1, keepdim=True) + eps)
    value = value * rstd
    if cast_before_weight:
        value = value.to(x.dtype).to(torch.float32)
    if weight is not None:
        value = value * (weight.to(torch.float32) + (1.0 if zero_centered else 0.0))
    return value.to(dtype or x.dtype), rstd.reshape(-1)


def layer_norm_reference(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`layer_norm` in plain PyTorch."""
    value = x.to(torch.float32)
    mean = value.mean(-1, keepdim=True)
    value = value - mean
    rstd = torch.rsqrt(value.square().mean(-1, keepdim=True) + eps)
    value = value * rstd
    if weight is not None:
        value = value * weight.to(torch.float32)
    if bias is not None:
        value = value + bias.to(torch.float32)
    return value.to(dtype or x.dtype), mean.reshape(-1), rstd.reshape(-1)


def rms_norm_quantize_reference(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    cast_before_weight: bool,
    zero_centered: bool,
    form: Form,
    keep_output: bool,
    dtype: torch.dtype | None = None,
    quantized_dtype: torch.dtype | None = None,
) -> list[torch.Tensor]:
    """`rms_norm_quantize` in plain PyTorch."""
    y, rstd = rms_norm_reference(x, weight, eps, cast_before_weight, zero_centered, dtype)
    buffers = reference_of(y.to(quantized_dtype or y.dtype), form)
    return [*([y] if keep_output else []), rstd, *buffers]


def layer_norm_quantize_reference(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    form: Form,
    keep_output: bool,
    dtype: torch.dtype | None = None,
    quantized_dtype: torch.dtype | None = None,
) -> list[torch.Tensor]:
    """`layer_norm_quantize` in plain PyTorch."""
    y, mean, rstd = layer_norm_reference(x, weight, bias, eps, dtype)
    buffers = reference_of(y.to(quantized_dtype or y.dtype), form)
    return [*([y] if keep_output else []), mean, rstd, *buffers]


# --- launchers ----------------------------------------------------------------------------------------------


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    cast_before_weight: bool,
    zero_centered: bool,
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(y, rstd): y in x's shape, rstd fp32 [rows]. weight (any float dtype, [K]) may be None."""
    x = x.contiguous()
    y = torch.empty_like(x, dtype=dtype)
    _, _, rstd, _ = launch_rows(x, norm_arguments(x, weight, None, False, cast_before_weight, zero_centered), eps, y=y)
    return y, rstd


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(y, mean, rstd): y in x's shape, the statistics fp32 [rows]. weight and bias may be None."""
    x = x.contiguous()
    y = torch.empty_like(x, dtype=dtype)
    _, mean, rstd, _ = launch_rows(x, norm_arguments(x, weight, bias, True), eps, y=y)
    return y, mean, rstd


def rms_norm_quantize(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    cast_before_weight: bool,
    zero_centered: bool,
    form: Form,
    keep_output: bool,
    dtype: torch.dtype | None = None,
    quantized_dtype: torch.dtype | None = None,
    tile: Tile | None = None,
    residual: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """[y?, rstd, data?, transpose?, scale_inv], equal to `rms_norm` then `quantize`. residual: as `add_rms_norm_quantize` takes it."""
    x = x.contiguous()
    norm = norm_arguments(x, weight, None, False, cast_before_weight, zero_centered)
    return norm_quantize(x, norm, eps, form, keep_output, tile, dtype, quantized_dtype, residual=residual)


def layer_norm_quantize(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    form: Form,
    keep_output: bool,
    dtype: torch.dtype | None = None,
    quantized_dtype: torch.dtype | None = None,
    tile: Tile | None = None,
    residual: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """[y?, mean, rstd, data?, transpose?, scale_inv], equal to `layer_norm` then `quantize`. residual: as `add_layer_norm_quantize` takes it."""
    x = x.contiguous()
    norm = norm_arguments(x, weight, bias, True)
    return norm_quantize(x, norm, eps, form, keep_output, tile, dtype, quantized_dtype, residual=residual)
