"""An FP8 GEMM and the amax of its result, in one launch where the kernel for a few rows runs.

    C = kernels/gemm/current.py's;  amax = max |C|, of the rounded values

What a linear writes is often what the next one quantizes, and with a few rows a launch takes as long as what it computes.
"""

from __future__ import annotations

import torch

from te_dynamo.kernels.gemm.choose import choose_for
from te_dynamo.kernels.gemm.current import check_operands, gemm, gemm_reference, gemm_with_tile
from te_dynamo.kernels.quantize.current import PARTIALS, partial_amaxes

__all__ = ["gemm_amax", "gemm_amax_reference"]


def gemm_amax(
    a: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b: torch.Tensor,
    b_scale_inv: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    fast_accum: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(C [M, N], fp32 [PARTIALS] whose maximum is the amax) of what `gemm` takes; ValueError where it raises one."""
    check_operands(a, b, bias, out_dtype)
    choice = choose_for(a, b, fast_accum, out_dtype, epilogue="amax")
    if not choice.fused:
        c = gemm(a, a_scale_inv, b, b_scale_inv, bias, out_dtype, fast_accum)
        return c, partial_amaxes(c)
    partials = torch.empty(PARTIALS, dtype=torch.float32, device=a.device)
    return gemm_with_tile(choice.tile, a, a_scale_inv, b, b_scale_inv, bias, out_dtype, partials), partials


def gemm_amax_reference(
    a: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b: torch.Tensor,
    b_scale_inv: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    fast_accum: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`gemm_amax` in plain PyTorch on any device; all its partial amaxes are the amax."""
    c = gemm_reference(a, a_scale_inv, b, b_scale_inv, bias, out_dtype, fast_accum)
    partials = torch.zeros(PARTIALS, dtype=torch.float32, device=a.device)
    if c.numel():
        partials += c.abs().amax()
    return c, partials
