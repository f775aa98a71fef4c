"""`te.gemm_nvfp4`: the product of two tensors in NVFP4."""

from typing import Optional

import torch

from te_dynamo.ops.define import te_op
from te_dynamo.ops.fakes import plain

__all__ = ["gemm_nvfp4"]


def _todo(*args):
    raise NotImplementedError


@te_op(reference=_todo, kernel=_todo)
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
    """[M, N] = a[M, K] @ b[N, K]^T (+ bias[N]) of packed 4-bit values, summed in fp32 and rounded once."""
    return plain((a.shape[0], b.shape[0]), out_dtype, a)
