"""NVFP4: two values a byte, an e4m3 scale for 16 of them and an fp32 amax (the table: kernels/quantize/nvfp4.py)."""

from __future__ import annotations

import torch

from te_dynamo.kernels.layouts import tiled_scales
from te_dynamo.kernels.layouts.sizes import Buffers, Size, blocks_of, round_up

BLOCK = 16
"""Elements with one scale."""

BUFFERS = ("data", "scale_inv", "amax", "columnwise_data", "columnwise_scale_inv", "columnwise_amax")


def data_shape(rows: Size, k: Size) -> tuple[Size, Size]:
    """The shape of the codes of [rows, k]: rows of whole 16 bytes."""
    return rows, round_up(k, 2 * BLOCK) // 2


def scale_shape(rows: Size, k: Size, swizzled: bool = False) -> tuple[Size, ...]:
    """The shape of the scales of [rows, k]."""
    return tiled_scales.scale_shape(rows, blocks_of(k, BLOCK), swizzled)


def buffers(rows: Size, columns: Size, rowwise: bool, columnwise: bool, swizzled: bool) -> Buffers:
    """data, scale_inv and amax of [rows, columns] if rowwise, those of its transpose if columnwise."""
    described: Buffers = {}
    for prefix, used, size in (("", rowwise, (rows, columns)), ("columnwise_", columnwise, (columns, rows))):
        if used:
            described[f"{prefix}data"] = (data_shape(*size), torch.uint8)
            described[f"{prefix}scale_inv"] = (scale_shape(*size, swizzled), torch.uint8)
            described[f"{prefix}amax"] = ((1,), torch.float32)
    return described
