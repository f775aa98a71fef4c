"""C[M, N] = A[M, K] @ B[N, K]^T of operands in MXFP8, blocks of 32 (kernels/quantize/mxfp8.py).

Tensor cores that know block scales multiply the codes (mxfp8_sm100.py). Elsewhere the GEMM is emulated: both operands become bf16, which
holds all their values exactly, and torch's own GEMM multiplies those.
"""

from __future__ import annotations

import torch

from te_dynamo.kernels.gemm.mxfp8_sm100 import applies_block_scales, gemm_mxfp8_sm100
from te_dynamo.kernels.quantize.mxfp8 import dequantize_mxfp8, dequantize_mxfp8_reference, swizzle_scales

__all__ = ["gemm_mxfp8", "gemm_mxfp8_reference"]


def gemm_mxfp8_reference(
    a: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b: torch.Tensor,
    b_scale_inv: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    a_columnwise: bool,
    b_columnwise: bool,
) -> torch.Tensor:
    """`gemm_mxfp8` in plain PyTorch on any device, products and sums in fp32."""
    check_operands(a, b, bias, a_columnwise, b_columnwise)
    value_a = dequantize_mxfp8_reference(a, a_scale_inv, a_columnwise, torch.float32)
    value_b = dequantize_mxfp8_reference(b, b_scale_inv, b_columnwise, torch.float32)
    value = (value_a.t() if a_columnwise else value_a) @ (value_b if b_columnwise else value_b.t())
    if bias is not None:
        value = value + bias.float()
    return value.to(out_dtype)


def check_operands(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, a_columnwise: bool, b_columnwise: bool
) -> None:
    """Raises ValueError, saying what is wrong, for operands that the GEMM does not take."""
    if a.dtype == b.dtype == torch.float8_e5m2:
        raise ValueError("te gemm_mxfp8: e5m2 x e5m2 is not supported; hold one operand in e4m3")
    if a.dim() != 2 or b.dim() != 2 or a.shape[0 if a_columnwise else 1] != b.shape[0 if b_columnwise else 1]:
        wanted = f"a [{'K, M' if a_columnwise else 'M, K'}] and b [{'K, N' if b_columnwise else 'N, K'}]"
        raise ValueError(f"te gemm_mxfp8: expected {wanted}, got {tuple(a.shape)} and {tuple(b.shape)}")
    if bias is not None and tuple(bias.shape) != (b.shape[1 if b_columnwise else 0],):
        raise ValueError(f"te gemm_mxfp8: expected bias [{b.shape[1 if b_columnwise else 0]}], got {tuple(bias.shape)}")


def gemm_mxfp8(
    a: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b: torch.Tensor,
    b_scale_inv: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    a_columnwise: bool,
    b_columnwise: bool,
) -> torch.Tensor:
    """C[M, N] = round(A[M, K] @ B[N, K]^T + bias[N]) of the values that the operands hold, on a CUDA device.

    a [M, K], or columnwise data [K, M]; b [N, K], or [K, N]; scales plain, as `quantize_mxfp8` returns them with them. Tensor
    cores that know block scales (sm_100) multiply the float8 data, if its rows are whole 16 bytes. Elsewhere both operands
    become bf16, which holds all values exactly, and multiply as such. The product is fp32, bias is added to that.
    Raises ValueError for e5m2 by e5m2 and for shapes that do not go together.
    """
    check_operands(a, b, bias, a_columnwise, b_columnwise)
    if applies_block_scales(a.device) and a.shape[1] % 16 == 0 and b.shape[1] % 16 == 0:
        a_swizzled = swizzle_scales(a_scale_inv.t() if a_columnwise else a_scale_inv)
        b_swizzled = swizzle_scales(b_scale_inv.t() if b_columnwise else b_scale_inv)
        return gemm_mxfp8_sm100(a, a_swizzled, b, b_swizzled, bias, out_dtype, a_columnwise, b_columnwise)
    value_a = dequantize_mxfp8(a, a_scale_inv, a_columnwise, torch.bfloat16)
    value_b = dequantize_mxfp8(b, b_scale_inv, b_columnwise, torch.bfloat16)
    left, right = value_a.t() if a_columnwise else value_a, value_b if b_columnwise else value_b.t()
    if bias is None and out_dtype == torch.bfloat16:
        return torch.mm(left, right)
    product = torch.mm(left, right, out_dtype=torch.float32)
    return (product if bias is None else product + bias.float()).to(out_dtype)
