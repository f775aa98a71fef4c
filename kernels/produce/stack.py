"""Tensors of several linears quantized as one, where each block has a scale of its own: their buffers are those of their concatenation.

    by rows       x_i [M_i, K] one below the other: [sum of M_i, K]
    by columns    x_i [M, K_i] one beside the other: [M, sum of K_i]

What is stacked are multiples of 128, so that no block, and no tile, holds values of two tensors. Each program reads where its tile lies:
the concatenation is nowhere in memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from te_dynamo.kernels.layouts.form import Form
from te_dynamo.kernels.layouts.sizes import rows_and_columns
from te_dynamo.kernels.produce.produce import Source, produce
from te_dynamo.kernels.quantize.current import stacked_size
from te_dynamo.kernels.quantize.formats import reference_of


def quantize_stacked_blocks_reference(xs: Sequence[torch.Tensor], form: Form, by_columns: bool) -> list[torch.Tensor]:
    """`quantize_stacked_blocks` in plain PyTorch, on any device."""
    stacked_size(xs, by_columns)
    return reference_of(torch.cat([x.reshape(-1, x.shape[-1]) for x in xs], int(by_columns)), form)


def quantize_stacked_blocks(xs: Sequence[torch.Tensor], form: Form, by_columns: bool) -> list[torch.Tensor]:
    """The buffers of the stack of xs, bf16, fp16 or fp32, of any rank >= 1 and read as matrices. Raises ValueError for what does not stack."""
    shape = stacked_size(xs, by_columns)
    sides = [rows_and_columns(x.shape)[by_columns] for x in xs]
    kind = "columns" if by_columns else "rows"
    return produce(Source("stack", [x.contiguous() for x in xs], sides, kind, stacked_shape=shape), form, False)[2]
