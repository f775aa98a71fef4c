"""Operands of the FP8 GEMM in current scaling, and its definition in float64."""

from __future__ import annotations

import torch

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2

FMAX = {E4M3: 448.0, E5M2: 57344.0}

OUT = [torch.bfloat16, torch.float16, torch.float32]


def operands(m: int, n: int, k: int, a_dtype=E4M3, b_dtype=E4M3, device: str = "cpu", seed: int = 0):
    """Random fp8 operands with the scales of current scaling, and a bias."""
    generator = torch.Generator().manual_seed(seed)
    quantized = []
    for rows, dtype in ((m, a_dtype), (n, b_dtype)):
        x = torch.randn(rows, k, generator=generator)
        scale = FMAX[dtype] / x.abs().max()
        quantized += [(x * scale).to(dtype).to(device), (1 / scale).reshape(1).to(device)]
    bias = torch.randn(n, generator=generator).to(device, torch.bfloat16)
    return *quantized, bias


def in_float64(a, a_scale_inv, b, b_scale_inv, bias=None):
    """The definition on the dequantized operands: scales go in before the sum, not after it."""
    left = a.to(torch.float64) * a_scale_inv.to(torch.float64)
    right = b.to(torch.float64) * b_scale_inv.to(torch.float64)
    value = torch.einsum("mk,nk->mn", left, right)
    return value if bias is None else value + bias.to(torch.float64)


def relative_error(got, want) -> float:
    """Of an empty product zero."""
    return float((got.double() - want.to(got.device)).norm() / want.norm().clamp(min=1e-30))
