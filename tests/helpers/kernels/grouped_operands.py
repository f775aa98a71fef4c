"""Quantized operands of the product of groups of columns, and its exact result."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from helpers.kernels.kernel_cases import FP8_DTYPES

from te_dynamo.kernels.layouts.tensor import TensorForm
from te_dynamo.kernels.quantize.current import quantize_reference

E4M3, E5M2 = FP8_DTYPES


def offsets(sizes: Sequence[int], device: str = "cpu") -> torch.Tensor:
    return torch.tensor(sizes).cumsum(0).to(device, torch.int32)


def column_operands(m: int, n: int, k: int, a_dtype=E5M2, device: str = "cpu", seed: int = 0):
    """a [N, M^16], b [K, M^16] and their scales."""
    generator = torch.Generator().manual_seed(seed)
    tensors = torch.randn(m, n, generator=generator), torch.randn(m, k, generator=generator)
    both = [
        quantize_reference(t, TensorForm(dtype, False, True, False, 0.0))
        for t, dtype in zip(tensors, (a_dtype, E4M3), strict=True)
    ]
    return tuple(t.to(device) for t in (*both[0], *both[1]))


def exact_columns(a, a_scale_inv, b, b_scale_inv, offs):
    products, start = [], 0
    for end in offs.tolist():
        left = a[:, start:end].double() * a_scale_inv.double()
        products.append(left @ (b[:, start:end].double() * b_scale_inv.double()).t())
        start = end
    return torch.stack(products)
