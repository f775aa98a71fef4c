"""`te.gemm_nvfp4`: the product of two tensors in NVFP4."""

from typing import Optional

import torch

from te_dynamo.dialect.define import te_op
from te_dynamo.dialect.fakes import plain
from te_dynamo.kernels.gemm import nvfp4 as kernels

__all__ = ["gemm_nvfp4"]


@te_op(reference=kernels.gemm_nvfp4_reference, kernel=kernels.gemm_nvfp4)
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
