"""FP8 with an E8M0 scale for 32 values (the table: kernels/quantize/mxfp8.py)."""

from __future__ import annotations

import torch

from te_dynamo.kernels.layouts import tiled_scales
from te_dynamo.kernels.layouts.sizes import Buffers, Size, blocks_of, transposed

BLOCK = 32

BUFFERS = ("data", "scale_inv", "columnwise_data", "columnwise_scale_inv")


def scale_shape(rows: Size, k: Size, swizzled: bool = False) -> tuple[Size, ...]:
    """The shape of the scales of data [rows, k] in blocks along its rows."""
    return tiled_scales.scale_shape(rows, blocks_of(k, BLOCK), swizzled)


def buffers(
    rows: Size,
    columns: Size,
    fp8_dtype: torch.dtype,
    rowwise: bool,
    columnwise: bool,
    scale_block: int,
    swizzled: bool,
) -> Buffers:
    """data and scale_inv of [rows, columns] if rowwise, those of its columns if columnwise: transposed with a scale_block of 128."""
    described: Buffers = {}
    if rowwise:
        described["data"] = ((rows, columns), fp8_dtype)
        described["scale_inv"] = (scale_shape(rows, columns, swizzled), torch.uint8)
    if columnwise:
        turned, scales = scale_block != BLOCK, scale_shape(columns, rows, swizzled)
        described["columnwise_data"] = (transposed(rows, columns) if turned else (rows, columns), fp8_dtype)
        described["columnwise_scale_inv"] = (scales if turned or swizzled else scales[::-1], torch.uint8)
    return described
