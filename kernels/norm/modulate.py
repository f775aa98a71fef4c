"""A LayerNorm whose weight and bias are a sample's own, alone and fused with quantization: adaLN, of DiT, Flux and Stable Diffusion 3.

    y[b, t] = (x[b, t] - mean) * rstd * w[b] + bias[b]          w = weight, or 1 + weight when `zero_centered`

x is [B, .., K], weight and bias are [B, 1, .., K], computed by the model (from the time step). All else is as in norm.py: fp32 with one
rounding at the end, two launches where it is fused, and the same bits as unfused and then `quantize`.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from te_dynamo.kernels.layouts.form import Form
from te_dynamo.kernels.norm.kernels import launch_rows, norm_arguments
from te_dynamo.kernels.norm.norm import layer_norm_reference
from te_dynamo.kernels.norm.quantized import norm_quantize
from te_dynamo.kernels.quantize.current import Tile
from te_dynamo.kernels.quantize.formats import reference_of

# --- reference ----------------------------------------------------------------------------------------------


def layer_norm_modulate_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    zero_centered: bool,
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`layer_norm_modulate` in plain PyTorch."""
    return layer_norm_reference(x, 1.0 + weight.to(torch.float32) if zero_centered else weight, bias, eps, dtype)


def layer_norm_modulate_quantize_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    zero_centered: bool,
    form: Form,
    keep_output: bool,
    dtype: torch.dtype | None = None,
    quantized_dtype: torch.dtype | None = None,
) -> list[torch.Tensor]:
    """`layer_norm_modulate_quantize` in plain PyTorch."""
    y, mean, rstd = layer_norm_modulate_reference(x, weight, bias, eps, zero_centered, dtype)
    buffers = reference_of(y.to(quantized_dtype or y.dtype), form)
    return [*([y] if keep_output else []), mean, rstd, *buffers]


# --- launchers ----------------------------------------------------------------------------------------------


def layer_norm_modulate(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    zero_centered: bool,
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(y, mean, rstd): y in x's shape, the statistics fp32 [rows]. weight and bias: any float dtype, [B, 1, .., K]."""
    x = x.contiguous()
    y = torch.empty_like(x, dtype=dtype)
    _, mean, rstd, _ = launch_rows(x, _modulation(x, weight, bias, zero_centered), eps, y=y)
    return y, mean, rstd


def layer_norm_modulate_quantize(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    zero_centered: bool,
    form: Form,
    keep_output: bool,
    dtype: torch.dtype | None = None,
    quantized_dtype: torch.dtype | None = None,
    tile: Tile | None = None,
) -> list[torch.Tensor]:
    """[y?, mean, rstd, data?, transpose?, scale_inv], equal to `layer_norm_modulate` then `quantize`."""
    x = x.contiguous()
    norm = _modulation(x, weight, bias, zero_centered)
    return norm_quantize(x, norm, eps, form, keep_output, tile, dtype, quantized_dtype)


def _modulation(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, zero_centered: bool) -> dict[str, Any]:
    """The kernel arguments that say which norm it is. Parts of a wider tensor are read where they lie."""
    weight, bias = (t if t.stride(-1) == 1 else t.contiguous() for t in (weight, bias))
    return {
        **norm_arguments(x, None, None, True, False, zero_centered),
        "weight": weight,
        "bias": bias,
        "rows_of_sample": math.prod(x.shape[1:-1]),
        "weight_stride": weight.stride(0),
        "bias_stride": bias.stride(0),
        "HAS_WEIGHT": True,
        "HAS_BIAS": True,
        "MODULATED": True,
    }
