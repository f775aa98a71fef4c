"""Norms, activations and their gradients that one kernel ends in quantized buffers, with the bits that te.quantize gives."""

from __future__ import annotations

from typing import Any, Optional

import torch

from te_dynamo.dialect import producers
from te_dynamo.dialect.activation import activation_backward_quantize
from te_dynamo.dialect.gated import gated_backward_quantize_halves
from te_dynamo.dialect.gemm import bias_grad
from te_dynamo.operations import types
from te_dynamo.operations.basic.activation import GELU, QGELU, ReLU, SiLU, SReLU
from te_dynamo.operations.basic.gated import GEGLU, GLU, QGEGLU, ReGLU, SwiGLU
from te_dynamo.operations.basic.norm import LayerNorm, RMSNorm
from te_dynamo.operations.basic.scaled import Scaled
from te_dynamo.operations.op import BasicOperation
from te_dynamo.quantized.quantizers import Quantizer

NORMS = (LayerNorm, RMSNorm)

ACTIVATIONS = (GELU, QGELU, ReLU, SiLU, SReLU)
"""The activations that te.activation has kernels for; GATED: te.gated."""
GATED = (GEGLU, GLU, QGEGLU, ReGLU, SwiGLU)

_WRITES_QUANTIZED = {**producers.NORMS, **producers.ACTIVATIONS}


def output_quantized(
    op: Any, x: torch.Tensor, params: types.Params, quantizer: Quantizer
) -> Optional[tuple[list[torch.Tensor], types.Saved]]:
    """(buffers of a norm's or an activation's output, what it saves), None where no kernel writes them."""
    if not quantizer.fused_producers or type(op) not in (*NORMS, *ACTIVATIONS, *GATED):
        return None
    producer, arguments = op.call(x, params)
    results = _WRITES_QUANTIZED[producer](*arguments, quantizer, False)
    statistics = len(producer._schema.returns) - 1
    return results[statistics:], [x, *params[:1], *results[:statistics]]


def unscaled(op: BasicOperation) -> BasicOperation:
    """An activation without the scales of its rows."""
    return op.activation() if isinstance(op, Scaled) else op


def has_gradient_kernel(activation: BasicOperation, quantizer: Quantizer) -> bool:
    """Whether `activation_gradient_quantized` knows the activation and the format."""
    return quantizer.fused_producers and type(activation) in (*ACTIVATIONS, *GATED)


def activation_gradient_quantized(
    activation: Any, dy: torch.Tensor, h: torch.Tensor, quantizer: Quantizer, needs_sums: bool
) -> tuple[Optional[torch.Tensor], list[torch.Tensor]]:
    """(column sums of dh in fp32 if asked for, buffers of dh), dh = dy * f'(h)."""
    dy, h, kind = dy.contiguous(), h.contiguous(), activation.kind()
    if type(activation) in ACTIVATIONS:
        results = activation_backward_quantize(dy, h, kind, quantizer, False, needs_sums)
        return (results[0] if needs_sums else None), results[int(needs_sums) :]
    results = gated_backward_quantize_halves(dy, *h.chunk(2, -1), kind, quantizer, needs_sums, True)
    return (bias_grad(results[0]) if needs_sums else None), results[int(needs_sums) :]
