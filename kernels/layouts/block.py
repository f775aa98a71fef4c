"""FP8 with one scale for 1x128 or 128x128 values (the tables: kernels/quantize/float8_block.py)."""

from __future__ import annotations

import torch

from te_dynamo.kernels.layouts.sizes import Buffers, Size, blocks_of, round_up, transposed

BLOCK = 128

BUFFERS = ("data", "scale_inv", "transpose", "columnwise_scale_inv")


def scale_shape(rows: Size, k: Size, two_d: bool) -> tuple[Size, Size]:
    """The shape of the scales of data [rows, k]. In 1D the contracted blocks come first, in 2D the order is that of the data."""
    blocks = blocks_of(k, BLOCK)
    return (blocks_of(rows, BLOCK), round_up(blocks, 4)) if two_d else (blocks, round_up(rows, 4))


def buffers(rows: Size, columns: Size, fp8_dtype: torch.dtype, rowwise: bool, columnwise: bool, two_d: bool) -> Buffers:
    """data and scale_inv of [rows, columns] if rowwise, transpose and columnwise_scale_inv if columnwise."""
    described: Buffers = {}
    if rowwise:
        described["data"] = ((rows, columns), fp8_dtype)
        described["scale_inv"] = (scale_shape(rows, columns, two_d), torch.float32)
    if columnwise:
        described["transpose"] = (transposed(rows, columns), fp8_dtype)
        described["columnwise_scale_inv"] = (scale_shape(columns, rows, two_d), torch.float32)
    return described
