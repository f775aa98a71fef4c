"""`te.gemm_mxfp8`: the product of two tensors in MXFP8, blocks of 32."""

from typing import Optional

import torch

from te_dynamo.dialect.define import te_op
from te_dynamo.dialect.fakes import plain
from te_dynamo.kernels.gemm import mxfp8 as kernels

__all__ = ["gemm_mxfp8"]


@te_op(reference=kernels.gemm_mxfp8_reference, kernel=kernels.gemm_mxfp8)
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
