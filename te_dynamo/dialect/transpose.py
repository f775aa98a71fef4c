"""`te.transpose`: the columnwise data of current scaling from the rowwise data, where making it with the rest would be too early."""

import torch

from te_dynamo.dialect.define import te_op
from te_dynamo.dialect.fakes import plain
from te_dynamo.kernels.quantize import transpose as kernels
from te_dynamo.kernels.tiles.fp8 import round_up, rows_and_columns

__all__ = ["transpose"]


@te_op(reference=kernels.transpose_reference, kernel=kernels.transpose)
def transpose(data: torch.Tensor) -> torch.Tensor:
    """[K, M^16] of float8 data, read as [M, K]; padding is zero. The bits that te.quantize writes with both usages on."""
    rows, columns = rows_and_columns(data)
    return plain((columns, round_up(rows, 16)), data.dtype, data)
