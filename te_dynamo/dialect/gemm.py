"""The products of quantized tensors, and what stands beside them in a linear: `te.add_bias`, `te.bias_grad`.

With one scale a tensor: `te.gemm`, its forms that do more in the same launch. With scales for parts of a row: `te.gemm_block` of
Float8 block scaling, `te.gemm_mxfp8`, `te.gemm_nvfp4`. Those of groups of rows are grouped.py's.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, Optional

import torch

from te_dynamo.dialect.define import te_op
from te_dynamo.dialect.fakes import column_sums, plain
from te_dynamo.kernels.gemm.choose import choose_for
from te_dynamo.kernels.gemm.multiply import multiply, multiply_gated, multiply_with_amax
from te_dynamo.kernels.gemm.reference import reference, reference_gated, reference_with_amax
from te_dynamo.kernels.gemm.request import Operand, Request
from te_dynamo.kernels.quantize.current import PARTIALS
from te_dynamo.kernels.tiles.stacking import Stacking

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


def runs(
    request: Callable[..., Request], kernel: Callable[..., Any] = multiply, plain: Callable[..., Any] = reference
) -> dict[str, Callable[..., Any]]:
    """How `te_op` runs an operation whose arguments `request` reads."""
    return {"reference": lambda *args: plain(request(*args)), "kernel": lambda *args: kernel(request(*args))}


def tensor_request(
    a: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b: torch.Tensor,
    b_scale_inv: torch.Tensor,
    bias: Optional[torch.Tensor],
    out_dtype: torch.dtype,
    fast_accum: bool,
    along: str = "",
    segments: Sequence[int] = (),
) -> Request:
    """The request of operands with one scale a tensor, or a segment."""
    stacking = Stacking(along, tuple(segments))
    return Request(Operand(a, a_scale_inv), Operand(b, b_scale_inv), out_dtype, fast_accum, bias, stacking=stacking)


@te_op(**runs(tensor_request))
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


@te_op(**runs(tensor_request, multiply_with_amax, reference_with_amax))
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


def sum_request(
    a: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b: torch.Tensor,
    b_scale_inv: torch.Tensor,
    bias: Optional[torch.Tensor],
    addend: torch.Tensor,
    out_dtype: torch.dtype,
    fast_accum: bool,
) -> Request:
    """The request of te.gemm_add."""
    return Request(Operand(a, a_scale_inv), Operand(b, b_scale_inv), out_dtype, fast_accum, bias, addend)


@te_op(**runs(sum_request))
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


def _gated(implementation: Callable[..., Any]) -> Callable[..., Any]:
    def run(a: Any, a_scale_inv: Any, b: Any, b_scale_inv: Any, fast_accum: bool, gate: int, kind: str) -> Any:
        return implementation(
            tensor_request(a, a_scale_inv, b, b_scale_inv, None, torch.bfloat16, fast_accum), gate, kind
        )

    return run


@te_op(reference=_gated(reference_gated), kernel=_gated(multiply_gated))
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


def block_request(
    a: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b: torch.Tensor,
    b_scale_inv: torch.Tensor,
    bias: Optional[torch.Tensor],
    out_dtype: torch.dtype,
    a_two_d: bool,
    b_two_d: bool,
) -> Request:
    sides = Operand(a, a_scale_inv, blocks(a_two_d)), Operand(b, b_scale_inv, blocks(b_two_d))
    return Request(*sides, out_dtype, bias=bias)


def blocks(two_d: bool) -> Literal["1x128", "128x128"]:
    """What has one scale."""
    return "128x128" if two_d else "1x128"


@te_op(**runs(block_request))
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


def mxfp8_request(
    a: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b: torch.Tensor,
    b_scale_inv: torch.Tensor,
    bias: Optional[torch.Tensor],
    out_dtype: torch.dtype,
    a_columnwise: bool,
    b_columnwise: bool,
) -> Request:
    sides = Operand(a, a_scale_inv, "1x32", a_columnwise), Operand(b, b_scale_inv, "1x32", b_columnwise)
    return Request(*sides, out_dtype, bias=bias)


@te_op(**runs(mxfp8_request))
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


def nvfp4_request(
    a: torch.Tensor,
    a_scale_inv: torch.Tensor,
    a_amax: torch.Tensor,
    b: torch.Tensor,
    b_scale_inv: torch.Tensor,
    b_amax: torch.Tensor,
    bias: Optional[torch.Tensor],
    out_dtype: torch.dtype,
) -> Request:
    sides = Operand(a, a_scale_inv, "1x16", amax=a_amax), Operand(b, b_scale_inv, "1x16", amax=b_amax)
    return Request(*sides, out_dtype, bias=bias)


@te_op(**runs(nvfp4_request))
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
