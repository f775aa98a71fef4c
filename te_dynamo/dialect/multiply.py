"""One product for every recipe, of operands as linears hold them."""

import dataclasses
from collections.abc import Sequence
from typing import Optional

import torch

from te_dynamo.dialect.gemm import gemm
from te_dynamo.dialect.quantize import transpose
from te_dynamo.kernels.layouts import mxfp8
from te_dynamo.kernels.layouts.block import BLOCK
from te_dynamo.kernels.layouts.sizes import blocks_of
from te_dynamo.kernels.layouts.tiled_scales import plain_scales, swizzle_scales
from te_dynamo.quantized.quantizers import Quantizer, check_product
from te_dynamo.quantized.storages.blocks import spread


@dataclasses.dataclass(slots=True)
class Operand:
    """One side of a product.

    tensors:   what a GEMM reads of it, from `quantizer.operand`.
    quantizer: how they are held, with one usage: columnwise contracts the leading dimensions instead of the last.
    """

    tensors: tuple[torch.Tensor, ...]
    quantizer: Quantizer

    @classmethod
    def of(cls, quantizer: Quantizer, buffers: Sequence[torch.Tensor], columnwise: bool) -> "Operand":
        """That usage of a tensor's buffers, which are in the order of `te.quantize`: columns are made where there are only rows of the
        same codes."""
        if columnwise and not quantizer.columnwise and quantizer.columns_are_rows():
            data, scale_inv = quantizer.operand(list(buffers), columnwise=False)
            codes = data
            if quantizer.transposes_columns():
                codes = transpose(data) if data.dim() == 2 else data.transpose(1, 2).contiguous()  # experts apart
            return cls((codes, _turned(quantizer, scale_inv, data)), quantizer.reading(columnwise=True))
        return cls(tuple(quantizer.operand(list(buffers), columnwise)), quantizer.reading(columnwise))


def _turned(quantizer: Quantizer, scale_inv: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
    """The columns' scales of data [M, K], of those of its rows: one for all of it as it is, [ceil(M/128), ceil(K/128)^4] as
    [ceil(K/128), ceil(M/128)^4], MXFP8's once for each column instead of once for each row."""
    if scale_inv.dim() == 1:
        return scale_inv
    if scale_inv.dtype == torch.uint8:
        blocks = plain_scales(scale_inv)[:: mxfp8.BLOCK]
        each = spread(blocks, (1, mxfp8.BLOCK), (blocks.shape[0], data.shape[1]))
        columns = torch.nn.functional.pad(each, (0, -data.shape[1] % 128))
        if scale_inv.dim() == 3:
            return swizzle_scales(columns.t())
        return columns.t().contiguous() if quantizer.transposes_columns() else columns
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

    fast_accum: as te.gemm takes it.
    addend:     [M, N], added to the rounded result, which is rounded to out_dtype again.
    Raises QuantizationError for operands without a GEMM.
    """
    check_product(a.quantizer, a.quantizer.columnwise, b.quantizer, b.quantizer.columnwise)
    operands = a.tensors, a.quantizer, b.tensors, b.quantizer, out_dtype, fast_accum, bias
    if addend is None or (a.quantizer.fused_producers and addend.dtype == out_dtype):
        return gemm(*operands, addend)
    return gemm(*operands).add_(addend)
