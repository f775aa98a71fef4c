"""The residual stream's addition with the norm that reads it, quantized: what fusion makes of the three.

Functions of a forward graph only: backward reads h, which is a result, and the statistics, as after the unfused operations.
"""

from typing import Optional

import torch

from te_dynamo.dialect.define import te_op
from te_dynamo.dialect.fakes import like, quantized, row_statistic
from te_dynamo.dialect.quantize import takes_quantizer
from te_dynamo.kernels.norm import add as kernels
from te_dynamo.quantized.quantizers import Quantizer


@te_op(
    reference=takes_quantizer(kernels.add_rms_norm_quantize_reference),
    kernel=takes_quantizer(kernels.add_rms_norm_quantize),
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
    reference=takes_quantizer(kernels.add_layer_norm_quantize_reference),
    kernel=takes_quantizer(kernels.add_layer_norm_quantize),
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
