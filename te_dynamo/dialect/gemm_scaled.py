"""The products of tensors with scales for parts of a row: of Float8 block scaling, of MXFP8 and of NVFP4."""

from typing import Optional

import torch

from te_dynamo.dialect.define import te_op
from te_dynamo.dialect.fakes import plain
from te_dynamo.kernels.gemm import block as block_kernels
from te_dynamo.kernels.gemm import mxfp8 as mxfp8_kernels
from te_dynamo.kernels.gemm import nvfp4 as nvfp4_kernels
from te_dynamo.kernels.runtime.device import device_of

__all__ = ["gemm_block", "gemm_mxfp8", "gemm_nvfp4"]


def _block_kernel(
    a: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b: torch.Tensor,
    b_scale_inv: torch.Tensor,
    bias: Optional[torch.Tensor],
    out_dtype: torch.dtype,
    a_two_d: bool,
    b_two_d: bool,
) -> torch.Tensor:
    """E8M0 codes, of which four are equal, are MXFP8 as they are to tensor cores that know it."""
    if a_scale_inv.dtype == torch.uint8 and device_of(a.device).has_block_scales:
        return mxfp8_kernels.gemm_mxfp8(a, a_scale_inv, b, b_scale_inv, bias, out_dtype, False, False)
    return block_kernels.gemm_block(a, a_scale_inv, b, b_scale_inv, bias, out_dtype, a_two_d, b_two_d)


@te_op(reference=block_kernels.gemm_block_reference, kernel=_block_kernel)
def gemm_block(
    a: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b: torch.Tensor,
    b_scale_inv: torch.Tensor,
    bias: Optional[torch.Tensor],
    out_dtype: torch.dtype,
    a_two_d: bool,
    b_two_d: bool,
) -> torch.Tensor:
    """[M, N] = a[M, K] @ b[N, K]^T (+ bias[N]), each 128 products times their scales, summed in fp32 and rounded once.

    Scales are fp32, of 1x128 or (two_d) 128x128 blocks, or uint8 E8M0 codes of 1x128 blocks.
    """
    return plain((a.shape[0], b.shape[0]), out_dtype, a)


@te_op(reference=mxfp8_kernels.gemm_mxfp8_reference, kernel=mxfp8_kernels.gemm_mxfp8)
def gemm_mxfp8(
    a: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b: torch.Tensor,
    b_scale_inv: torch.Tensor,
    bias: Optional[torch.Tensor],
    out_dtype: torch.dtype,
    a_columnwise: bool,
    b_columnwise: bool,
) -> torch.Tensor:
    """[M, N] = a[M, K] @ b[N, K]^T (+ bias[N]), summed in fp32 and rounded once.

    A columnwise operand is held as [K, M] ([K, N]): blocks along K, not transposed.
    """
    m, n = a.shape[1 if a_columnwise else 0], b.shape[1 if b_columnwise else 0]
    return plain((m, n), out_dtype, a)


@te_op(reference=nvfp4_kernels.gemm_nvfp4_reference, kernel=nvfp4_kernels.gemm_nvfp4)
def gemm_nvfp4(
    a: torch.Tensor,
    a_scale_inv: torch.Tensor,
    a_amax: torch.Tensor,
    b: torch.Tensor,
    b_scale_inv: torch.Tensor,
    b_amax: torch.Tensor,
    bias: Optional[torch.Tensor],
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """[M, N] = a[M, K] @ b[N, K]^T * (a_amax * b_amax / 2688^2) (+ bias[N]), two e2m1 values a byte, 16 with one e4m3 scale.

    Summed in fp32 and rounded once.
    """
    return plain((a.shape[0], b.shape[0]), out_dtype, a)
