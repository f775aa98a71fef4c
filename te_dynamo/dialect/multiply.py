"""One product for every recipe: which GEMM multiplies two quantized tensors, and how it is told of their layout."""

import dataclasses
from collections.abc import Sequence
from typing import Optional

import torch

from te_dynamo.dialect.gemm import gemm, gemm_add, gemm_block, gemm_mxfp8, gemm_nvfp4
from te_dynamo.dialect.quantize import transpose
from te_dynamo.errors import QuantizationError
from te_dynamo.kernels.layouts.block import BLOCK
from te_dynamo.kernels.layouts.sizes import blocks_of
from te_dynamo.quantized.quantizers import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Quantizer,
    check_product,
)

GEMMS = (gemm, gemm_block, gemm_mxfp8, gemm_nvfp4)
"""The products of two quantized tensors. All have arguments `bias` and `out_dtype`."""


@dataclasses.dataclass(slots=True)
class Operand:
    """One side of a product.

    quantizer:  how the tensor is held.
    tensors:    what a GEMM reads of it, from `quantizer.operand`.
    columnwise: contract its leading dimensions instead of the last.
    """

    quantizer: Quantizer
    tensors: tuple[torch.Tensor, ...]
    columnwise: bool

    @classmethod
    def of(cls, quantizer: Quantizer, buffers: Sequence[torch.Tensor], columnwise: bool) -> "Operand":
        """That usage of a tensor's buffers, which are in the order of `te.quantize`: columns are made where there are only rows of the
        same codes."""
        if columnwise and not quantizer.columnwise and quantizer.columns_are_rows():
            data, scale_inv = quantizer.operand(list(buffers), columnwise=False)
            return cls(quantizer.with_usage(False, True), (transpose(data), _turned(scale_inv, data)), True)
        return cls(quantizer, tuple(quantizer.operand(list(buffers), columnwise)), columnwise)


def _turned(scale_inv: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
    """The scales of the transpose of data [M, K]: one for all of it as it is, [ceil(M/128), ceil(K/128)^4] as [ceil(K/128), ceil(M/128)^4]."""
    if scale_inv.dim() == 1:
        return scale_inv
    rows, columns = scale_inv.shape[0], blocks_of(data.shape[1], BLOCK)
    return torch.nn.functional.pad(scale_inv[:, :columns], (0, 0, 0, -rows % 4)).t().contiguous()


def multiply(
    a: Operand,
    b: Operand,
    out_dtype: torch.dtype,
    fast_accum: bool,
    bias: Optional[torch.Tensor] = None,
    addend: Optional[torch.Tensor] = None,
) -> torch.Tensor:
    """[M, N] = a @ b^T (+ bias [N]) over the dimension that both contract, rounded once to out_dtype.

    fast_accum: of te.gemm; the other GEMMs always add up in fp32.
    addend:     [M, N], added to the rounded result, which is rounded to out_dtype again.
    Raises QuantizationError for operands without a GEMM.
    """
    if addend is None:
        return _product(a, b, out_dtype, fast_accum, bias)
    if a.quantizer.fused_sums and addend.dtype == out_dtype:
        check_product(a.quantizer, a.columnwise, b.quantizer, b.columnwise)
        return gemm_add(*a.tensors, *b.tensors, bias, addend, out_dtype, fast_accum)
    return _product(a, b, out_dtype, fast_accum, bias).add_(addend)


def _product(
    a: Operand, b: Operand, out_dtype: torch.dtype, fast_accum: bool, bias: Optional[torch.Tensor]
) -> torch.Tensor:
    check_product(a.quantizer, a.columnwise, b.quantizer, b.columnwise)
    operands = (*a.tensors, *b.tensors, bias, out_dtype)
    one, other = a.quantizer, b.quantizer
    if isinstance(one, Float8CurrentScalingQuantizer):
        return gemm(*operands, fast_accum)
    if isinstance(one, Float8BlockQuantizer) and isinstance(other, Float8BlockQuantizer):
        return gemm_block(*operands, one.block_dims == 2, other.block_dims == 2)
    if isinstance(one, MXFP8Quantizer):
        if one.scale_block == 32:
            return gemm_mxfp8(*operands, a.columnwise, b.columnwise)
        # K-major in both usages, like 1x128 blocks.
        return (gemm_mxfp8 if one.swizzled else gemm_block)(*operands, False, False)
    if isinstance(one, NVFP4Quantizer):
        return gemm_nvfp4(*operands)
    raise QuantizationError(f"no GEMM multiplies {one.describe()} by {other.describe()}")
