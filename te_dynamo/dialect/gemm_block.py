"""`te.gemm_block`: the FP8 product with scales for every 128 products, of Float8 block scaling and of MXFP8 with scale_block=128."""

from typing import Optional

import torch

from te_dynamo.dialect.define import te_op
from te_dynamo.dialect.fakes import plain
from te_dynamo.kernels.gemm import block as kernels
from te_dynamo.kernels.gemm.mxfp8 import gemm_mxfp8
from te_dynamo.kernels.runtime.device import device_of

__all__ = ["gemm_block"]


def _kernel(
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
        return gemm_mxfp8(a, a_scale_inv, b, b_scale_inv, bias, out_dtype, False, False)
    return kernels.gemm_block(a, a_scale_inv, b, b_scale_inv, bias, out_dtype, a_two_d, b_two_d)


@te_op(reference=kernels.gemm_block_reference, kernel=_kernel)
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
