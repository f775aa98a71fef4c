"""An FP8 GEMM and the amax of its result, in one launch where the kernel for a few rows runs.

    C = kernels/gemm/current.py's;  amax = max |C|, of the rounded values

What a linear writes is often what the next one quantizes, and with a few rows a launch takes as long as what it computes.
"""

from __future__ import annotations

import torch

from te_dynamo.kernels.gemm.current import check_operands, gemm, gemm_reference, gemm_with_tile, reduce_programs
from te_dynamo.kernels.gemm.decode import DecodeTile, decode_tile
from te_dynamo.kernels.quantize.current import PARTIALS, partial_amaxes
from te_dynamo.kernels.runtime._triton import triton
from te_dynamo.kernels.runtime.launch import is_hopper, multiprocessor_count, size_hint

__all__ = ["gemm_amax", "gemm_amax_reference", "has_amax"]


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
    tile = _tile(a, b, fast_accum)
    if tile is None:
        c = gemm(a, a_scale_inv, b, b_scale_inv, bias, out_dtype, fast_accum)
        return c, partial_amaxes(c)
    partials = torch.empty(PARTIALS, dtype=torch.float32, device=a.device)
    return gemm_with_tile(tile, a, a_scale_inv, b, b_scale_inv, bias, out_dtype, partials), partials


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


def has_amax(a: torch.Tensor, b: torch.Tensor, fast_accum: bool) -> bool:
    """Whether the amax costs no pass over C: a has few rows, a number known when compiling, and a kernel writes both."""
    return _tile(a, b, fast_accum) is not None


def _tile(a: torch.Tensor, b: torch.Tensor, fast_accum: bool) -> DecodeTile | None:
    n, k = size_hint(b.shape[0]), size_hint(a.shape[1])
    tile = decode_tile(a.shape[0], n, k, fast_accum, is_hopper(a.device), multiprocessor_count(a.device))
    if tile is None:
        return None
    programs = triton.cdiv(n, tile.block_n) if tile.split_k == 1 else reduce_programs(a.shape[0], n)
    return tile if programs <= PARTIALS else None
