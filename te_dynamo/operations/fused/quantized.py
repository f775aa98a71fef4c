"""Norms, activations and their gradients that end in quantized buffers: one kernel where there is one, two operations elsewhere.

Both ways give the same bits.
"""

from __future__ import annotations

from typing import Optional

import torch

from te_dynamo.dialect.activation import activation_backward_quantize, activation_quantize
from te_dynamo.dialect.gated import gated_backward_quantize_halves, gated_quantize
from te_dynamo.dialect.gemm import bias_grad
from te_dynamo.dialect.norm import layer_norm, layer_norm_quantize, rms_norm, rms_norm_quantize
from te_dynamo.operations import types
from te_dynamo.operations.basic.activation import GELU, QGELU, Activation, ReLU, SiLU, SReLU
from te_dynamo.operations.basic.gated import GEGLU, GLU, QGEGLU, Gated, ReGLU, SwiGLU
from te_dynamo.operations.basic.norm import LayerNorm, RMSNorm
from te_dynamo.operations.op import BasicOperation
from te_dynamo.quantized.quantize import quantize_tensor
from te_dynamo.quantized.quantizers import Quantizer

NORMS = (LayerNorm, RMSNorm)

DIALECT = (GELU, QGELU, ReLU, SiLU, SReLU)
"""The activations that te.activation has kernels for."""

DIALECT_GATED = (GEGLU, GLU, QGEGLU, ReGLU, SwiGLU)
"""The gated activations that te.gated has kernels for."""


def norm_quantized(
    norm: BasicOperation, x: torch.Tensor, params: types.Params, quantizer: Quantizer
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """(statistics: mean of a LayerNorm, rstd; buffers of the norm's output)."""
    x = x.contiguous()
    if isinstance(norm, RMSNorm):
        settings = (params[0], norm.eps, norm.cast_before_weight, norm.zero_centered)
        if quantizer.fused_producers:
            rstd, *buffers = rms_norm_quantize(x, *settings, quantizer, False)
            return [rstd], buffers
        y, rstd = rms_norm(x, *settings)
        return [rstd], quantize_tensor(y, quantizer)
    assert isinstance(norm, LayerNorm)
    weight, bias = params
    if quantizer.fused_producers:
        mean, rstd, *buffers = layer_norm_quantize(x, weight, bias, norm.eps, quantizer, False)
        return [mean, rstd], buffers
    y, mean, rstd = layer_norm(x, weight, bias, norm.eps)
    return [mean, rstd], quantize_tensor(y, quantizer)


def activation_quantized(activation: BasicOperation, h: torch.Tensor, quantizer: Quantizer) -> list[torch.Tensor]:
    """Buffers of f(h)."""
    if quantizer.fused_producers and type(activation) in DIALECT:
        return list(activation_quantize(h, activation.kind(), quantizer, False))  # type: ignore[attr-defined]
    if quantizer.fused_producers and type(activation) in DIALECT_GATED:
        return list(gated_quantize(*h.chunk(2, -1), activation.kind(), quantizer, False))  # type: ignore[attr-defined]
    assert isinstance(activation, (Activation, Gated))
    return quantize_tensor(activation.forward(h).contiguous(), quantizer)


def activation_gradient_quantized(
    activation: BasicOperation, dy: torch.Tensor, h: torch.Tensor, quantizer: Quantizer, needs_sums: bool
) -> tuple[Optional[torch.Tensor], list[torch.Tensor]]:
    """(column sums of dh in fp32 if asked for, buffers of dh), dh = dy * f'(h)."""
    if quantizer.fused_producers and type(activation) in DIALECT:
        kind = activation.kind()  # type: ignore[attr-defined]
        results = activation_backward_quantize(dy.contiguous(), h, kind, quantizer, False, needs_sums)
        return (results[0] if needs_sums else None), list(results[int(needs_sums) :])
    if quantizer.fused_producers and type(activation) in DIALECT_GATED:
        args = (*h.chunk(2, -1), activation.kind(), quantizer, needs_sums, True)  # type: ignore[attr-defined]
        results = gated_backward_quantize_halves(dy.contiguous(), *args)
        return (bias_grad(results[0]) if needs_sums else None), list(results[int(needs_sums) :])
    assert isinstance(activation, (Activation, Gated))
    dh = activation.backward(dy, h)
    buffers = quantize_tensor(dh.contiguous(), quantizer)  # before the sums, as in te.linear's backward
    return (bias_grad(dh) if needs_sums else None), buffers
