"""The FP8 products of one scale a tensor: `te.gemm`, its forms that do more in the same launch, those of groups whose sizes only the
device knows; and what stands beside them in a linear: `te.add_bias`, `te.bias_grad`."""

from typing import Optional

import torch

from te_dynamo.dialect.define import te_op
from te_dynamo.dialect.fakes import column_sums, plain
from te_dynamo.kernels.gemm import add as add_kernels
from te_dynamo.kernels.gemm import current as kernels
from te_dynamo.kernels.gemm import gated as gated_kernels
from te_dynamo.kernels.gemm import grouped as grouped_kernels
from te_dynamo.kernels.gemm.amax import gemm_amax as launch_gemm_amax
from te_dynamo.kernels.gemm.amax import gemm_amax_reference
from te_dynamo.kernels.gemm.choose import choose_for
from te_dynamo.kernels.quantize.current import PARTIALS

__all__ = [
    "add_bias",
    "bias_grad",
    "choose_for",
    "gemm",
    "gemm_add",
    "gemm_amax",
    "gemm_grouped",
    "gemm_grouped_columns",
    "gemm_gated",
]


@te_op(reference=kernels.gemm_reference, kernel=kernels.gemm)
def gemm(
    a: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b: torch.Tensor,
    b_scale_inv: torch.Tensor,
    bias: Optional[torch.Tensor],
    out_dtype: torch.dtype,
    fast_accum: bool,
) -> torch.Tensor:
    """[M, N] = (a[M, K] @ b[N, K]^T) * (a_scale_inv * b_scale_inv) (+ bias[N]), summed in fp32 and rounded once to out_dtype."""
    return plain((a.shape[0], b.shape[0]), out_dtype, a)


@te_op(reference=gemm_amax_reference, kernel=launch_gemm_amax)
def gemm_amax(
    a: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b: torch.Tensor,
    b_scale_inv: torch.Tensor,
    bias: Optional[torch.Tensor],
    out_dtype: torch.dtype,
    fast_accum: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(y = te.gemm of the same arguments, fp32 [PARTIALS] whose maximum is the amax of y)."""
    return plain((a.shape[0], b.shape[0]), out_dtype, a), plain((PARTIALS,), torch.float32, a)


@te_op(reference=add_kernels.gemm_add_reference, kernel=add_kernels.gemm_add)
def gemm_add(
    a: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b: torch.Tensor,
    b_scale_inv: torch.Tensor,
    bias: Optional[torch.Tensor],
    addend: torch.Tensor,
    out_dtype: torch.dtype,
    fast_accum: bool,
) -> torch.Tensor:
    """[M, N] = te.gemm of the others, rounded to out_dtype, + addend[M, N] of that dtype, in fp32 and rounded again."""
    return plain((a.shape[0], b.shape[0]), out_dtype, a)


@te_op(reference=gated_kernels.gemm_gated_reference, kernel=gated_kernels.gemm_gated)
def gemm_gated(
    a: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b: torch.Tensor,
    b_scale_inv: torch.Tensor,
    fast_accum: bool,
    gate: int,
    kind: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(y, partial amaxes, fp32 [PARTIALS], of te.gated of y's halves): y = te.gemm_stacked along "N" of two halves, in bf16.

    gate: which half is the gate's, 0 or 1; kind: as te.gated takes it.
    """
    return plain((a.shape[0], b.shape[0]), torch.bfloat16, a), plain((PARTIALS,), torch.float32, a)


@te_op(reference=grouped_kernels.gemm_grouped_reference, kernel=grouped_kernels.gemm_grouped)
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
    grouped_kernels.check_rows(a, b, b_scale_inv, offs, out_dtype)
    return plain((a.shape[0], b.shape[1]), out_dtype, a)


@te_op(reference=grouped_kernels.gemm_grouped_columns_reference, kernel=grouped_kernels.gemm_grouped_columns)
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
    grouped_kernels.check_columns(a, b, offs, out_dtype)
    return plain((offs.shape[0], a.shape[0], b.shape[0]), out_dtype, a)


def _add_bias(x: torch.Tensor, bias: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    return (x.to(torch.float32) + bias.to(torch.float32)).to(out_dtype)


@te_op(reference=_add_bias)
def add_bias(x: torch.Tensor, bias: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """x[M, N] (fp32) + bias[N] in fp32, rounded to out_dtype."""
    return plain(tuple(x.shape), out_dtype, x)


def _bias_grad(dy: torch.Tensor) -> torch.Tensor:
    return dy.reshape(-1, dy.shape[-1]).sum(0, dtype=torch.float32)


@te_op(reference=_bias_grad)
def bias_grad(dy: torch.Tensor) -> torch.Tensor:
    """Column sums [N] of dy read as [M, N], in fp32."""
    return column_sums(dy)
