"""h = x + residual, and the norm of h quantized: the residual stream's addition fused with what reads it (norms: norm.py).

    h      = round(x + residual)                 in the wider of their dtypes, as an addition of its own gives it
    y      = rms_norm(h) or layer_norm(h)
    data, transpose, scale_inv = quantize(y)

In the launches of the norm alone (kernels.py): equal to an addition, then `rms_norm_quantize`, bit for bit.
"""

from __future__ import annotations

from typing import Any

import torch

from te_dynamo.kernels.layouts.form import Form
from te_dynamo.kernels.norm.kernels import norm_arguments
from te_dynamo.kernels.norm.norm import layer_norm_quantize_reference, rms_norm_quantize_reference
from te_dynamo.kernels.norm.quantized import norm_quantize
from te_dynamo.kernels.quantize.current import Tile

# --- reference ----------------------------------------------------------------------------------------------


def add_rms_norm_quantize_reference(x: torch.Tensor, residual: torch.Tensor, *norm: Any) -> list[torch.Tensor]:
    """`add_rms_norm_quantize` in plain PyTorch; `norm` are the further arguments of `rms_norm_quantize`."""
    h = x + residual
    return [h, *rms_norm_quantize_reference(h, *norm)]


def add_layer_norm_quantize_reference(x: torch.Tensor, residual: torch.Tensor, *norm: Any) -> list[torch.Tensor]:
    """`add_layer_norm_quantize` in plain PyTorch; `norm` are the further arguments of `layer_norm_quantize`."""
    h = x + residual
    return [h, *layer_norm_quantize_reference(h, *norm)]


# --- launchers ----------------------------------------------------------------------------------------------


def add_rms_norm_quantize(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    cast_before_weight: bool,
    zero_centered: bool,
    form: Form,
    keep_output: bool,
    dtype: torch.dtype | None = None,
    quantized_dtype: torch.dtype | None = None,
    tile: Tile | None = None,
) -> list[torch.Tensor]:
    """[h, y?, rstd, data?, transpose?, scale_inv], equal to x + residual, then `rms_norm_quantize`.

    x and residual are of one shape, and bf16, fp16 or fp32.
    """
    x, residual = x.contiguous(), residual.contiguous()
    norm = norm_arguments(x, weight, None, False, cast_before_weight, zero_centered)
    return norm_quantize(x, norm, eps, form, keep_output, tile, dtype, quantized_dtype, residual=residual)


def add_layer_norm_quantize(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    form: Form,
    keep_output: bool,
    dtype: torch.dtype | None = None,
    quantized_dtype: torch.dtype | None = None,
    tile: Tile | None = None,
) -> list[torch.Tensor]:
    """[h, y?, mean, rstd, data?, transpose?, scale_inv], equal to x + residual, then `layer_norm_quantize`."""
    x, residual = x.contiguous(), residual.contiguous()
    norm = norm_arguments(x, weight, bias, True)
    return norm_quantize(x, norm, eps, form, keep_output, tile, dtype, quantized_dtype, residual=residual)
