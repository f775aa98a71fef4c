"""The products of quantized tensors by groups of rows, and the columns that they read: what te.grouped_linear is made of.

Group g is offs[g - 1] <= m < offs[g], offs int32 [G], ascending. With one scale a tensor: `te.gemm_grouped`, `te.gemm_grouped_columns`.
With scales for parts of a row: `te.gemm_grouped_block` and `te.gemm_grouped_mxfp8`, of weights [G, N, K] quantized as [G N, K], and
their products of columns. A block of columns is of 32 or 128 tokens. None is two groups': `te.quantize_group_columns` quantizes the tokens
in their padded order, of P = padded_rows(M, G) rows (kernels/tiles/groups.py).

    quantize_groups, multiply_groups, multiply_group_columns     the same for every format
"""

import torch

from te_dynamo.dialect.define import te_op
from te_dynamo.dialect.fakes import plain
from te_dynamo.dialect.gemm import blocks, runs
from te_dynamo.dialect.multiply import Operand
from te_dynamo.dialect.quantize import Format
from te_dynamo.errors import QuantizationError
from te_dynamo.kernels.gemm.request import Operand as KernelOperand
from te_dynamo.kernels.gemm.request import Request, check
from te_dynamo.kernels.quantize import float8_block, mxfp8
from te_dynamo.kernels.tiles.groups import padded_rows
from te_dynamo.quantized.quantize import quantize_tensor
from te_dynamo.quantized.quantizers import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    MXFP8Quantizer,
    Quantizer,
)
from te_dynamo.quantized.tensor_proto import TensorProto

# --- one function for every format --------------------------------------------------------------------------


def quantize_groups(x: torch.Tensor, offs: torch.Tensor, quantizer: Quantizer) -> list[torch.Tensor]:
    """The buffers of x [M, K], contiguous, in the order of its quantizer, its columns as products by groups read them."""
    if quantizer.one_scale:
        return quantize_tensor(x, quantizer)
    buffers = quantize_tensor(x, quantizer.with_usage(columnwise=False)) if quantizer.rowwise else []
    if quantizer.columnwise:
        buffers = [*buffers, *quantize_group_columns(x, offs, quantizer.with_usage(False, True))]
    return buffers


def columns_proto(x: TensorProto, groups: int, quantizer: Quantizer) -> TensorProto:
    """What `quantize_groups` makes of x's columns."""
    rows = x.shape[0] if quantizer.one_scale else padded_rows(x.shape[0], groups)
    return TensorProto((rows, x.shape[1]), x.dtype, quantizer.with_usage(False, True), device=x.device)


def multiply_groups(
    a: Operand, b: Operand, offs: torch.Tensor, out_dtype: torch.dtype, fast_accum: bool
) -> torch.Tensor:
    """[M, N]: rows m of a [M, K] of group g @ b[g]^T, for b the weights [G, N, K], or by columns [G, K, N]; zero behind the last group.

    fast_accum: of te.gemm_grouped; the others always add up in fp32.
    """
    operands = (*a.tensors, *b.tensors, offs, out_dtype)
    if isinstance(a.quantizer, Float8CurrentScalingQuantizer):
        return gemm_grouped(*operands, fast_accum)
    if isinstance(a.quantizer, MXFP8Quantizer) and a.quantizer.scale_block == 32:
        return gemm_grouped_mxfp8(*operands, b.columnwise)
    two_d = isinstance(b.quantizer, Float8BlockQuantizer) and b.quantizer.block_dims == 2
    return gemm_grouped_block(*operands, two_d, b.columnwise)


def multiply_group_columns(
    a: Operand, b: Operand, offs: torch.Tensor, out_dtype: torch.dtype, fast_accum: bool
) -> torch.Tensor:
    """[G, N, K] = a_g^T @ b_g of the columns of a [M, N] and b [M, K] (`quantize_groups`); zero for an empty group."""
    operands = (*a.tensors, *b.tensors, offs, out_dtype)
    if isinstance(a.quantizer, Float8CurrentScalingQuantizer):
        return gemm_grouped_columns(*operands, fast_accum)
    if isinstance(a.quantizer, MXFP8Quantizer) and a.quantizer.scale_block == 32:
        return gemm_grouped_mxfp8_columns(*operands)
    return gemm_grouped_block_columns(*operands)


# --- columns ------------------------------------------------------------------------------------------------

_COLUMNS: dict[type[Quantizer], Format] = {
    Float8BlockQuantizer: Format(
        float8_block.quantize_block_columns,
        float8_block.quantize_block_columns_reference,
        lambda q, _: (q.dtype, q.power_of_two_scale, q.amax_epsilon),
    ),
    MXFP8Quantizer: Format(
        mxfp8.quantize_mxfp8_columns,
        mxfp8.quantize_mxfp8_columns_reference,
        lambda q, _: (q.dtype, q.scale_block),
    ),
}


def _columns_format(quantizer: Quantizer) -> Format:
    if type(quantizer) not in _COLUMNS or quantizer.no_groups_reason() or quantizer.rowwise:
        raise QuantizationError(
            f"te.quantize_group_columns: {quantizer.describe()}: expected columns in 1x128 blocks or MXFP8"
        )
    return _COLUMNS[type(quantizer)]


def _columns_kernel(x: torch.Tensor, offs: torch.Tensor, quantizer: Quantizer) -> list[torch.Tensor]:
    form = _columns_format(quantizer)
    return form.kernel(x, offs, *form.arguments(quantizer, None))


def _columns_reference(x: torch.Tensor, offs: torch.Tensor, quantizer: Quantizer) -> list[torch.Tensor]:
    form = _columns_format(quantizer)
    return form.reference(x, offs, *form.arguments(quantizer, None))


@te_op(reference=_columns_reference, kernel=_columns_kernel)
def quantize_group_columns(x: torch.Tensor, offs: torch.Tensor, quantizer: Quantizer) -> list[torch.Tensor]:
    """te.quantize's columns of x [M, K] in the padded order of its groups: zero rows behind each, to a multiple of 128.

    x: contiguous, bf16, fp16 or fp32. quantizer: of blocks, columnwise alone.
    """
    _columns_format(quantizer)
    proto = TensorProto(tuple(x.shape), x.dtype, device=x.device)
    return columns_proto(proto, offs.shape[0], quantizer).create_buffers()


def _fake(request: Request) -> torch.Tensor:
    check(request)
    return plain(request.shape, request.out_dtype, request.a.codes)


# --- products -----------------------------------------------------------------------------------------------


def rows_request(
    a: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b: torch.Tensor,
    b_scale_inv: torch.Tensor,
    offs: torch.Tensor,
    out_dtype: torch.dtype,
    fast_accum: bool,
) -> Request:
    sides = KernelOperand(a, a_scale_inv), KernelOperand(b, b_scale_inv)
    return Request(*sides, out_dtype, fast_accum, groups="rows", offs=offs)


@te_op(**runs(rows_request))
def gemm_grouped(
    a: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b: torch.Tensor,
    b_scale_inv: torch.Tensor,
    offs: torch.Tensor,
    out_dtype: torch.dtype,
    fast_accum: bool,
) -> torch.Tensor:
    """[M, N]: row m of group g is a[m, K] @ b[g, N, K]^T * (a_scale_inv * b_scale_inv[g]), zero behind the last group."""
    return _fake(rows_request(a, a_scale_inv, b, b_scale_inv, offs, out_dtype, fast_accum))


def columns_request(
    a: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b: torch.Tensor,
    b_scale_inv: torch.Tensor,
    offs: torch.Tensor,
    out_dtype: torch.dtype,
    fast_accum: bool,
) -> Request:
    sides = KernelOperand(a, a_scale_inv), KernelOperand(b, b_scale_inv)
    return Request(*sides, out_dtype, fast_accum, groups="columns", offs=offs)


@te_op(**runs(columns_request))
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
    return _fake(columns_request(a, a_scale_inv, b, b_scale_inv, offs, out_dtype, fast_accum))


def block_rows_request(
    a: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b: torch.Tensor,
    b_scale_inv: torch.Tensor,
    offs: torch.Tensor,
    out_dtype: torch.dtype,
    b_two_d: bool,
    b_columnwise: bool,
) -> Request:
    sides = KernelOperand(a, a_scale_inv, "1x128"), KernelOperand(b, b_scale_inv, blocks(b_two_d))
    return Request(*sides, out_dtype, groups="rows", offs=offs, deep=b_columnwise)


@te_op(**runs(block_rows_request))
def gemm_grouped_block(
    a: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b: torch.Tensor,
    b_scale_inv: torch.Tensor,
    offs: torch.Tensor,
    out_dtype: torch.dtype,
    b_two_d: bool,
    b_columnwise: bool,
) -> torch.Tensor:
    """[M, N]: row m of group g is te.gemm_block of a[m, K] and b[g], b [G N, K] or, columnwise, [N, G K]; zero behind the last group."""
    return _fake(block_rows_request(a, a_scale_inv, b, b_scale_inv, offs, out_dtype, b_two_d, b_columnwise))


def block_columns_request(
    a: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b: torch.Tensor,
    b_scale_inv: torch.Tensor,
    offs: torch.Tensor,
    out_dtype: torch.dtype,
) -> Request:
    sides = KernelOperand(a, a_scale_inv, "1x128"), KernelOperand(b, b_scale_inv, "1x128")
    return Request(*sides, out_dtype, groups="columns", offs=offs)


@te_op(**runs(block_columns_request))
def gemm_grouped_block_columns(
    a: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b: torch.Tensor,
    b_scale_inv: torch.Tensor,
    offs: torch.Tensor,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """[G, N, K]: te.gemm_block of the columns a [N, P] and b [K, P] of each group; zero for an empty one."""
    return _fake(block_columns_request(a, a_scale_inv, b, b_scale_inv, offs, out_dtype))


def mxfp8_rows_request(
    a: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b: torch.Tensor,
    b_scale_inv: torch.Tensor,
    offs: torch.Tensor,
    out_dtype: torch.dtype,
    b_columnwise: bool,
) -> Request:
    sides = KernelOperand(a, a_scale_inv, "1x32"), KernelOperand(b, b_scale_inv, "1x32", b_columnwise)
    return Request(*sides, out_dtype, groups="rows", offs=offs, deep=b_columnwise)


@te_op(**runs(mxfp8_rows_request))
def gemm_grouped_mxfp8(
    a: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b: torch.Tensor,
    b_scale_inv: torch.Tensor,
    offs: torch.Tensor,
    out_dtype: torch.dtype,
    b_columnwise: bool,
) -> torch.Tensor:
    """[M, N]: row m of group g is te.gemm_mxfp8 of a[m, K] and b[g], b [G N, K] or, columnwise, [G K, N]; zero behind the last group."""
    return _fake(mxfp8_rows_request(a, a_scale_inv, b, b_scale_inv, offs, out_dtype, b_columnwise))


def mxfp8_columns_request(
    a: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b: torch.Tensor,
    b_scale_inv: torch.Tensor,
    offs: torch.Tensor,
    out_dtype: torch.dtype,
) -> Request:
    sides = KernelOperand(a, a_scale_inv, "1x32", True), KernelOperand(b, b_scale_inv, "1x32", True)
    return Request(*sides, out_dtype, groups="columns", offs=offs)


@te_op(**runs(mxfp8_columns_request))
def gemm_grouped_mxfp8_columns(
    a: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b: torch.Tensor,
    b_scale_inv: torch.Tensor,
    offs: torch.Tensor,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """[G, N, K]: te.gemm_mxfp8 of the columns a [P, N] and b [P, K] of each group; zero for an empty one."""
    return _fake(mxfp8_columns_request(a, a_scale_inv, b, b_scale_inv, offs, out_dtype))
