"""FP8 with one scale a row, of x and of x^T each by itself (the table: kernels/quantize/float8_rowwise.py)."""

from __future__ import annotations

import torch

from te_dynamo.kernels.layouts.sizes import Buffers, Size, transposed

BUFFERS = ("data", "scale_inv", "transpose", "columnwise_scale_inv")


def buffers(
    rows: Size, columns: Size, fp8_dtype: torch.dtype, rowwise: bool, columnwise: bool, groups: tuple[Size, ...] = ()
) -> Buffers:
    """data and scale_inv of [rows, columns] if rowwise, transpose and columnwise_scale_inv if columnwise; of each of (G,) such matrices."""
    described: Buffers = {}
    if rowwise:
        described["data"] = ((*groups, rows, columns), fp8_dtype)
        described["scale_inv"] = ((*groups, rows), torch.float32)
    if columnwise:
        described["transpose"] = ((*groups, *transposed(rows, columns)), fp8_dtype)
        described["columnwise_scale_inv"] = ((*groups, columns), torch.float32)
    return described
