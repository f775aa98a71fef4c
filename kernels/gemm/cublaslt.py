"""Products with scales of tensors, and of blocks of 128, by cuBLASLt, as torch calls it (torch._scaled_mm).

    C[M, N] = round((A[M, K] @ B[N, K]^T) * (a_scale_inv * b_scale_inv) + bias[N])
    C[M, N] = round(sum over blocks kb of 128 k: (A_kb @ B_kb^T) * (a_scale_kb * b_scale_kb) + bias[N])

cuBLASLt adds a bias to what it has rounded already. Here a product with a bias is fp32, and a pass adds the bias and rounds once. In which
order cuBLASLt adds up the products is its own to choose: C agrees with the other kernels within the rounding of fp32 sums, not bit for bit.

The call is an operation of its own in graphs: for torch's Inductor would time Triton kernels of its own, and may take one.
"""

from __future__ import annotations

import torch

from te_dynamo.kernels.gemm.request import Request

_MULTIPLE = 16  # of the rows of A with scales of blocks, and of those of B: what torch asks for
_K_MULTIPLE = 512  # with scales of blocks: torch asks for rows of scales without padding, cuBLASLt for multiples of 4
_BLOCK = 128

_library = torch.library.Library("te_kernels", "DEF")
_library.define(
    "scaled_mm(Tensor a, Tensor b, Tensor a_scale, Tensor b_scale, ScalarType out_dtype, bool fast_accum) -> Tensor"
)


def _scaled_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    out_dtype: torch.dtype,
    fast_accum: bool,
) -> torch.Tensor:
    return torch._scaled_mm(a, b.t(), a_scale, b_scale, out_dtype=out_dtype, use_fast_accum=fast_accum)


def _scaled_mm_fake(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    out_dtype: torch.dtype,
    fast_accum: bool,
) -> torch.Tensor:
    return a.new_empty((a.shape[0], b.shape[0]), dtype=out_dtype)


_library.impl("scaled_mm", _scaled_mm, "CompositeExplicitAutograd")
_library.impl("scaled_mm", _scaled_mm_fake, "Meta")

SCALED_MM = torch.ops.te_kernels.scaled_mm.default
"""[M, N] = torch._scaled_mm(a, b.t(), ...), of a [M, K], b [N, K] and their scales."""


def can_use_cublaslt(m: int, n: int, k: int, blocks: bool) -> bool:
    """Whether torch multiplies A [m, k] by B [n, k], with scales of tensors or of blocks."""
    return n % _MULTIPLE == 0 and not (blocks and (m % _MULTIPLE or k % _K_MULTIPLE))


def multiply_cublaslt(r: Request) -> torch.Tensor:
    """The module docstring's C; on a CPU too with a tensor's scales. Those of blocks are in fp32, on Hopper alone."""
    a_scale, b_scale = r.a.scale_inv, r.b.scale_inv
    if r.scaling != "tensor":
        blocks = -(-r.mnk[2] // _BLOCK)
        a_scale = a_scale[:, :blocks] if r.a.scaling == "128x128" else a_scale.t()
        b_scale = b_scale[:, :blocks].t() if r.b.scaling == "128x128" else b_scale
    dtype = r.out_dtype if r.bias is None else torch.float32
    c: torch.Tensor = SCALED_MM(r.a.codes, r.b.codes, a_scale, b_scale, dtype, r.fast)
    return c if r.bias is None else (c + r.bias.float()).to(r.out_dtype)
