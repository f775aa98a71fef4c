"""h = x + residual, and the norm of h quantized: the residual stream's addition fused with what reads it (norms: norm.py).

    h      = round(x + residual)                 in the wider of their dtypes, as an addition of its own gives it
    y      = rms_norm(h) or layer_norm(h)
    data, transpose, scale_inv = quantize(y)

In the launches of the norm alone (kernels.py): equal to an addition, then `rms_norm_quantize`, bit for bit.
"""

from __future__ import annotations

from typing import Any

import torch

from te_dynamo.kernels.norm.norm import (
    layer_norm_quantize,
    layer_norm_quantize_reference,
    rms_norm_quantize,
    rms_norm_quantize_reference,
)
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
    x: torch.Tensor, residual: torch.Tensor, *norm: Any, tile: Tile | None = None
) -> list[torch.Tensor]:
    """[h, y?, rstd, data?, transpose?, scale_inv], equal to x + residual, then `rms_norm_quantize`, of whose further arguments `norm` are.

    x and residual are of one shape, and bf16, fp16 or fp32.
    """
    return rms_norm_quantize(x, *norm, tile=tile, residual=residual.contiguous())


def add_layer_norm_quantize(x: torch.Tensor, residual: torch.Tensor, *norm: Any) -> list[torch.Tensor]:
    """[h, y?, mean, rstd, data?, transpose?, scale_inv], equal to x + residual, then `layer_norm_quantize`, of whose further arguments `norm` are."""
    return layer_norm_quantize(x, *norm, residual=residual.contiguous())
