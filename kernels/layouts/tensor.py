"""FP8 with one scale a tensor [M, K], a group of [G, N, K], or a tensor of a stack: data, its transpose, the scales."""

from __future__ import annotations

import torch

from te_dynamo.kernels.layouts.sizes import Buffers, Size, transposed

BUFFERS = ("data", "transpose", "scale_inv")


def buffers(
    shape: tuple[Size, ...], fp8_dtype: torch.dtype, rowwise: bool, columnwise: bool, scales: Size = 1
) -> Buffers:
    """data [..., M, K] if rowwise, transpose [..., K, M^16] if columnwise, scale_inv fp32 [scales]."""
    described: Buffers = {}
    if rowwise:
        described["data"] = (shape, fp8_dtype)
    if columnwise:
        described["transpose"] = ((*shape[:-2], *transposed(*shape[-2:])), fp8_dtype)
    described["scale_inv"] = ((scales,), torch.float32)
    return described
