"""C[M, N] = A[M, K] @ B[N, K]^T of operands in NVFP4 (kernels/quantize/nvfp4.py).

Tensor cores that apply the scales of blocks themselves multiply the codes (kernels/gemm/block_scales.py). Elsewhere the GEMM is emulated:
operands times their block scales are exact in bf16, torch's own GEMM multiplies those, and one launch applies the tensors' scales, adds
the bias and rounds.
"""

from __future__ import annotations

import torch

from te_dynamo.kernels.gemm.block_scales import multiply_scaled
from te_dynamo.kernels.quantize.nvfp4 import TENSOR_MAX, dequantize_nvfp4, dequantize_nvfp4_reference
from te_dynamo.kernels.quantize.nvfp4_kernels import nvfp4_epilogue_kernel
from te_dynamo.kernels.quantize.scales import swizzle_scales
from te_dynamo.kernels.runtime._triton import triton
from te_dynamo.kernels.runtime.launch import launch
from te_dynamo.kernels.runtime.target import target_of

_OUT = (torch.bfloat16, torch.float16, torch.float32)


def gemm_nvfp4_reference(
    a: torch.Tensor,
    a_scale_inv: torch.Tensor,
    a_amax: torch.Tensor,
    b: torch.Tensor,
    b_scale_inv: torch.Tensor,
    b_amax: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """`gemm_nvfp4` in plain PyTorch on any device: products and sums in fp32."""
    check_operands(a, a_scale_inv, b, b_scale_inv, bias, out_dtype)
    width = 2 * a.shape[1]
    product = dequantize_nvfp4_reference(a, a_scale_inv, None, width, torch.float32)
    product = product @ dequantize_nvfp4_reference(b, b_scale_inv, None, width, torch.float32).t()
    value = product * gemm_alpha(a_amax, b_amax)
    if bias is not None:
        value = value + bias.to(torch.float32)
    return value.to(out_dtype)


def gemm_alpha(a_amax: torch.Tensor, b_amax: torch.Tensor) -> torch.Tensor:
    """amaxA * amaxB / 2688^2, fp32 [1], in an order that overflows only with the result."""
    full = torch.full_like(a_amax, TENSOR_MAX)
    return (a_amax / full) * (b_amax / full)


def check_operands(
    a: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b: torch.Tensor,
    b_scale_inv: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> None:
    """Raises ValueError, saying what is wrong, for operands that the GEMM does not take."""
    if out_dtype not in _OUT:
        raise ValueError(f"te gemm_nvfp4: out_dtype must be bfloat16, float16 or float32, got {out_dtype}")
    if any(tensor.dtype != torch.uint8 for tensor in (a, a_scale_inv, b, b_scale_inv)) or a.dim() != 2 or b.dim() != 2:
        raise ValueError("te gemm_nvfp4: data and scales are uint8 tensors, as quantize_nvfp4 returns them")
    if a.shape[1] != b.shape[1]:
        raise ValueError(
            f"te gemm_nvfp4: expected a [M, K/2] and b [N, K/2], got {tuple(a.shape)} and {tuple(b.shape)}"
        )
    if bias is not None and (bias.dim() != 1 or bias.shape[0] != b.shape[0]):
        raise ValueError(f"te gemm_nvfp4: expected bias [{b.shape[0]}], got {tuple(bias.shape)}")


def gemm_nvfp4(
    a: torch.Tensor,
    a_scale_inv: torch.Tensor,
    a_amax: torch.Tensor,
    b: torch.Tensor,
    b_scale_inv: torch.Tensor,
    b_amax: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """C[M, N] = round(sum_k (A * scale_a)[M, k] (B * scale_b)[N, k] * (amaxA * amaxB / 2688^2) + bias), on a CUDA device.

    a [M, K/2] and b [N, K/2] with their scales and amaxes as `quantize_nvfp4` returns one usage; bias [N] of any
    floating dtype, or None. Tensor cores that know block scales multiply the codes, of which plain scales are swizzled first. Elsewhere
    operands times their block scales, exact in bfloat16, are multiplied. Products are summed in fp32; alpha, bias and the one
    rounding follow. Raises ValueError for other operands.
    """
    check_operands(a, a_scale_inv, b, b_scale_inv, bias, out_dtype)
    if target_of(a.device).has_block_scales:
        operands = (a, swizzle_scales(a_scale_inv), a_amax), (b, swizzle_scales(b_scale_inv), b_amax)
        return multiply_scaled(*operands, bias, out_dtype, False, False)
    width = 2 * a.shape[1]
    left = dequantize_nvfp4(a, a_scale_inv, None, width, torch.bfloat16)
    right = dequantize_nvfp4(b, b_scale_inv, None, width, torch.bfloat16)
    product = torch.mm(left, right.t(), out_dtype=torch.float32)
    rows, columns = product.shape
    c = torch.empty(rows, columns, dtype=out_dtype, device=a.device)
    launch(
        nvfp4_epilogue_kernel,
        (triton.cdiv(rows, 16) * triton.cdiv(columns, 256),),
        product=product,
        a_amax=a_amax,
        b_amax=b_amax,
        bias=a_amax if bias is None else bias,
        c=c,
        M=rows,
        N=columns,
        HAS_BIAS=bias is not None,
        BLOCK_M=16,
        BLOCK_N=256,
        num_warps=4,
    )
    return c
