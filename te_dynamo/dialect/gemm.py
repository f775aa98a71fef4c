"""The FP8 product `te.gemm`, its forms that do more in the same launch, and what stands beside it in a linear: `te.add_bias`, `te.bias_grad`."""

from typing import Optional

import torch

from te_dynamo.dialect.define import te_op
from te_dynamo.dialect.fakes import column_sums, plain
from te_dynamo.kernels.gemm import add as add_kernels
from te_dynamo.kernels.gemm import current as kernels
from te_dynamo.kernels.gemm.amax import gemm_amax as launch_gemm_amax
from te_dynamo.kernels.gemm.amax import gemm_amax_reference
from te_dynamo.kernels.gemm.choose import choose_for
from te_dynamo.kernels.quantize.current import PARTIALS

__all__ = ["add_bias", "bias_grad", "choose_for", "gemm", "gemm_add", "gemm_amax"]


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
