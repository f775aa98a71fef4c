"""The FP8 products of groups of rows, and of groups of columns, whose sizes only the device knows."""

import torch

from te_dynamo.dialect.define import te_op
from te_dynamo.dialect.fakes import plain
from te_dynamo.kernels.gemm import grouped as kernels

__all__ = ["gemm_grouped", "gemm_grouped_columns"]


@te_op(reference=kernels.gemm_grouped_reference, kernel=kernels.gemm_grouped)
def gemm_grouped(
    a: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b: torch.Tensor,
    b_scale_inv: torch.Tensor,
    offs: torch.Tensor,
    out_dtype: torch.dtype,
    fast_accum: bool,
) -> torch.Tensor:
    """[M, N]: row m of group g is a[m, K] @ b[g, N, K]^T * (a_scale_inv * b_scale_inv[g]), zero behind the last group.

    Group g is offs[g - 1] <= m < offs[g]; offs is int32 [G], ascending.
    """
    kernels.check_rows(a, b, b_scale_inv, offs, out_dtype)
    return plain((a.shape[0], b.shape[1]), out_dtype, a)


@te_op(reference=kernels.gemm_grouped_columns_reference, kernel=kernels.gemm_grouped_columns)
def gemm_grouped_columns(
    a: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b: torch.Tensor,
    b_scale_inv: torch.Tensor,
    offs: torch.Tensor,
    out_dtype: torch.dtype,
    fast_accum: bool,
) -> torch.Tensor:
    """[G, N, K]: a[N, M] @ b[K, M]^T * (a_scale_inv * b_scale_inv) over the columns of each group; zero for an empty one."""
    kernels.check_columns(a, b, offs, out_dtype)
    return plain((offs.shape[0], a.shape[0], b.shape[0]), out_dtype, a)
