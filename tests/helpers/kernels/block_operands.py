"""Operands of the block-scaled GEMM, and its definition in float64."""

from __future__ import annotations

import torch
from helpers.kernels.gemm_operands import E4M3

from te_dynamo.kernels.layouts.block import BlockForm
from te_dynamo.kernels.quantize.float8_block import quantize_block_reference

BLOCKS = {"1x128.128x128": (False, True), "128x128.1x128": (True, False), "1x128.1x128": (False, False)}


def spread(rows: int, k: int, generator: torch.Generator) -> torch.Tensor:
    """Normal values whose blocks of 128 differ by powers of two, so that a scale in the wrong place shows."""
    x = torch.randn(rows, k, generator=generator)
    powers = torch.randint(-4, 5, (rows, -(-k // 128)), generator=generator)
    return torch.ldexp(x, powers.repeat_interleave(128, dim=1)[:, :k])


def operands(m: int, n: int, k: int, blocks: str, a_dtype=E4M3, b_dtype=E4M3, device: str = "cpu", power_of_two=True):
    """a, its scales, b, its scales, bias, and the two flags."""
    generator = torch.Generator().manual_seed(0)
    quantized: list[torch.Tensor] = []
    for rows, dtype, two_d in zip((m, n), (a_dtype, b_dtype), BLOCKS[blocks], strict=True):
        x = spread(rows, k, generator)
        quantized += quantize_block_reference(x, BlockForm(dtype, True, False, two_d, power_of_two, 0.0))
    bias = torch.randn(n, generator=generator).to(torch.bfloat16)
    return *(tensor.to(device) for tensor in (*quantized, bias)), *BLOCKS[blocks]


def e8m0(scale_inv: torch.Tensor, rows: int) -> torch.Tensor:
    """Power-of-two scales [blocks, M^4] as codes in MXFP8's rowwise layout; its padding must not be read, so it is NaN."""
    blocks = scale_inv.shape[0]
    codes = torch.full((-(-rows // 128) * 128, 4 * blocks), 255, dtype=torch.uint8, device=scale_inv.device)
    exponents = torch.frexp(scale_inv[:, :rows].t().double())[1] + 126
    codes[:rows, ::4] = exponents.clamp(0, 254).to(torch.uint8)
    return codes


def in_float64(a, a_scale_inv, b, b_scale_inv, bias, a_two_d, b_two_d):
    """The definition on the dequantized operands: scales go in before the sum, not after it."""

    def dequantize(data, scale_inv, two_d):
        rows, k = data.shape
        grid = scale_inv.double().cpu()
        grid = grid.repeat_interleave(128, dim=0) if two_d else grid.t()
        return data.double().cpu() * grid[:rows].repeat_interleave(128, dim=1)[:, :k]

    value = dequantize(a, a_scale_inv, a_two_d) @ dequantize(b, b_scale_inv, b_two_d).t()
    return value if bias is None else value + bias.double().cpu()
