"""The FP8 GEMM of kernels/gemm/current.py by cuBLASLt, as torch calls it.

    C[M, N] = round((A[M, K] @ B[N, K]^T) * (a_scale_inv * b_scale_inv) + bias[N])

cuBLASLt adds a bias to what it has rounded already. Here a product with a bias is fp32, and a pass adds the bias and rounds once. In which
order cuBLASLt adds up the products is its own to choose: C agrees with the other kernels within the rounding of fp32 sums, not bit for bit.
"""

from __future__ import annotations

import torch

_MULTIPLE = 16  # of N: what torch asks for


def can_use_cublaslt(n: int) -> bool:
    """Whether torch multiplies by a B of n rows."""
    return n % _MULTIPLE == 0


def gemm_cublaslt(
    a: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b: torch.Tensor,
    b_scale_inv: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    fast_accum: bool,
) -> torch.Tensor:
    """The module docstring's C, of what `kernels/gemm/current.py:gemm` takes, N a multiple of 16; on a CPU too."""
    dtype = out_dtype if bias is None else torch.float32
    c = torch._scaled_mm(a, b.t(), a_scale_inv, b_scale_inv, out_dtype=dtype, use_fast_accum=fast_accum)
    return c if bias is None else (c + bias.float()).to(out_dtype)
