"""C[M, N] = A[M, K] @ B[N, K]^T of operands in MXFP8, blocks of 32 (kernels/quantize/mxfp8.py).

    C[M, N] = round(sum over k of A[m, k] * 2^(ea[m, k/32] - 127) * B[n, k] * 2^(eb[n, k/32] - 127) + bias[n])

Tensor cores that apply the scales of blocks themselves multiply the codes (kernels/gemm/block_scales.py). Elsewhere the GEMM is
emulated: both operands become bf16, which holds all their values exactly, and torch's own GEMM multiplies those.
"""

from __future__ import annotations

import torch

from te_dynamo.kernels.gemm.block_scales import multiply_scaled
from te_dynamo.kernels.layouts.tiled_scales import swizzle_scales
from te_dynamo.kernels.quantize.mxfp8 import dequantize_mxfp8, dequantize_mxfp8_reference
from te_dynamo.kernels.runtime.target import Target, target_of


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

    a [M, K], or columnwise data [K, M]; b [N, K], or [K, N]; scales plain or swizzled, as `quantize_mxfp8` returns them with them.
    Tensor cores that know block scales multiply the float8 data (`multiplies_codes`), of which plain scales are swizzled first. Elsewhere
    both operands become bf16, which holds all values exactly, and multiply as such. The product is fp32, bias is added to that.
    Raises ValueError for e5m2 by e5m2 and for shapes that do not go together.
    """
    check_operands(a, b, bias, a_columnwise, b_columnwise)
    if multiplies_codes(target_of(a.device), b_columnwise) and a.shape[1] % 16 == 0 and b.shape[1] % 16 == 0:
        a_scale_inv, b_scale_inv = _swizzled(a_scale_inv, a_columnwise), _swizzled(b_scale_inv, b_columnwise)
        return multiply_scaled((a, a_scale_inv), (b, b_scale_inv), bias, out_dtype, a_columnwise, b_columnwise)
    value_a = dequantize_mxfp8(a, a_scale_inv, a_columnwise, torch.bfloat16)
    value_b = dequantize_mxfp8(b, b_scale_inv, b_columnwise, torch.bfloat16)
    left, right = value_a.t() if a_columnwise else value_a, value_b if b_columnwise else value_b.t()
    if bias is None and out_dtype == torch.bfloat16:
        return torch.mm(left, right)
    product = torch.mm(left, right, out_dtype=torch.float32)
    return (product if bias is None else product + bias.float()).to(out_dtype)


def multiplies_codes(target: Target, b_columnwise: bool) -> bool:
    """Whether the tensor cores multiply the codes. `mma.sync` wants the rows of b: turning columns takes more registers than there are."""
    return target.has_block_scales and (target.has_tensor_memory or not b_columnwise)


def _swizzled(scale_inv: torch.Tensor, columnwise: bool) -> torch.Tensor:
    return swizzle_scales(scale_inv.t() if columnwise and scale_inv.dim() == 2 else scale_inv)
