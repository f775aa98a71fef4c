"""NVFP4: two values a byte, an e4m3 scale for 16 of them and an fp32 amax (the table: kernels/quantize/nvfp4.py)."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch

from te_dynamo.kernels.layouts import tiled_scales
from te_dynamo.kernels.layouts.form import Form
from te_dynamo.kernels.layouts.sizes import Buffers, Size, blocks_of, round_up, rows_and_columns

BLOCK = 16
"""Elements with one scale."""

HADAMARD_SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
"""Of the transform of columns (kernels/quantize/nvfp4.py). Random once, now fixed, so that the operands of a product agree: the signs that
Transformer Engine uses."""


def data_shape(rows: Size, k: Size) -> tuple[Size, Size]:
    """The shape of the codes of [rows, k]: rows of whole 16 bytes."""
    return rows, round_up(k, 2 * BLOCK) // 2


def scale_shape(rows: Size, k: Size, swizzled: bool = False) -> tuple[Size, ...]:
    """The shape of the scales of [rows, k]."""
    return tiled_scales.scale_shape(rows, blocks_of(k, BLOCK), swizzled)


@dataclasses.dataclass(frozen=True)
class NVFP4Form(Form):
    """two_d: blocks of 16x16. hadamard: columns are rotated. stochastic_rounding: by random bits. swizzled: kernels/layouts/tiled_scales.py.

    ValueError for two_d with hadamard.
    """

    NAMES: ClassVar[tuple[str, ...]] = (
        *("data", "scale_inv", "amax"),
        *("columnwise_data", "columnwise_scale_inv", "columnwise_amax"),
    )

    dtype: torch.dtype = dataclasses.field(default=torch.uint8, init=False)
    two_d: bool = False
    hadamard: bool = False
    stochastic_rounding: bool = False
    swizzled: bool = False

    def __post_init__(self) -> None:
        if self.two_d and self.hadamard:
            raise ValueError(
                "te nvfp4: 16x16 blocks share scales between rows and columns, so columns cannot be transformed"
            )

    def buffers(self, shape: tuple[Size, ...]) -> Buffers:
        """data, scale_inv and amax of [M, K] if rowwise, those of its transpose if columnwise."""
        rows, columns = rows_and_columns(shape)
        described: Buffers = {}
        usages = ("", self.rowwise, (rows, columns)), ("columnwise_", self.columnwise, (columns, rows))
        for prefix, used, size in usages:
            if used:
                described[f"{prefix}data"] = (data_shape(*size), self.dtype)
                described[f"{prefix}scale_inv"] = (scale_shape(*size, self.swizzled), torch.uint8)
                described[f"{prefix}amax"] = ((1,), torch.float32)
        return described

    def constants(self) -> dict[str, Any]:
        options = {"TWO_D": self.two_d, "HADAMARD": self.hadamard, "STOCHASTIC": self.stochastic_rounding}
        return {**options, "SWIZZLED": self.swizzled}
