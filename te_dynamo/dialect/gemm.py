"""The products of quantized tensors, and what stands beside them in a linear: `te.add_bias`, `te.bias_grad`.

With one scale a tensor: `te.gemm`, its forms that do more in the same launch. With scales for parts of a row: `te.gemm_block` of
Float8 block scaling, `te.gemm_mxfp8`, `te.gemm_nvfp4`. Those of groups of rows are grouped.py's.
"""

from typing import Optional

import torch

from te_dynamo.dialect.define import te_op
from te_dynamo.dialect.fakes import column_sums, plain
from te_dynamo.kernels.gemm import block as block_kernels
from te_dynamo.kernels.gemm import current as kernels
from te_dynamo.kernels.gemm import epilogue as epilogue_kernels
from te_dynamo.kernels.gemm import mxfp8 as mxfp8_kernels
from te_dynamo.kernels.gemm import nvfp4 as nvfp4_kernels
from te_dynamo.kernels.gemm.choose import choose_for
from te_dynamo.kernels.gemm.specialized import gated as gated_kernels
from te_dynamo.kernels.quantize.current import PARTIALS
from te_dynamo.kernels.runtime.target import target_of

__all__ = [
    "add_bias",
    "bias_grad",
    "choose_for",
    "gemm",
    "gemm_add",
    "gemm_amax",
    "gemm_block",
    "gemm_gated",
    "gemm_mxfp8",
    "gemm_nvfp4",
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


@te_op(reference=epilogue_kernels.gemm_amax_reference, kernel=epilogue_kernels.gemm_amax)
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


@te_op(reference=epilogue_kernels.gemm_add_reference, kernel=epilogue_kernels.gemm_add)
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
    if a_scale_inv.dtype == torch.uint8 and target_of(a.device).has_block_scales:
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
