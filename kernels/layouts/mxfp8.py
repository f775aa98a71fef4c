"""FP8 with an E8M0 scale for 32 values (the table: kernels/quantize/mxfp8.py)."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch

from te_dynamo.kernels.layouts import tiled_scales
from te_dynamo.kernels.layouts.form import Form
from te_dynamo.kernels.layouts.sizes import Buffers, Size, blocks_of, rows_and_columns, transposed

BLOCK = 32

SCALE_BLOCKS = (BLOCK, 128)


def scale_shape(rows: Size, k: Size, swizzled: bool = False) -> tuple[Size, ...]:
    """The shape of the scales of data [rows, k] in blocks along its rows."""
    return tiled_scales.scale_shape(rows, blocks_of(k, BLOCK), swizzled)


def columnwise_names(scale_block: int, two_d: bool) -> tuple[str, str]:
    """The buffers of columns. In blocks of 32x32 their codes are those of the rows, in the same order: there is one buffer of both."""
    return "data" if two_d and scale_block == BLOCK else "columnwise_data", "columnwise_scale_inv"


def powers_of_two(codes: torch.Tensor) -> torch.Tensor:
    """2^(code - 127) in fp32 of E8M0 codes, from the bits: code 0 is a denormal, with its highest mantissa bit alone, code 255 NaN."""
    codes = codes.to(torch.int32)
    bits = torch.where(codes == 0, 0x00400000, codes << 23)
    return torch.where(codes == 255, 0x7FC00000, bits).view(torch.float32)


@dataclasses.dataclass(frozen=True)
class MXFP8Form(Form):
    """scale_block: 32, or 128 for one scale four times; ValueError for another. swizzled: kernels/layouts/tiled_scales.py.
    two_d: one scale for as many rows as values of a row."""

    NAMES: ClassVar[tuple[str, ...]] = ("data", "scale_inv", "columnwise_data", "columnwise_scale_inv")

    scale_block: int
    swizzled: bool = False
    two_d: bool = False

    def __post_init__(self) -> None:
        if self.scale_block not in SCALE_BLOCKS:
            raise ValueError(f"te mxfp8: scale_block must be 32 or 128, got {self.scale_block}")

    @property
    def turns(self) -> bool:
        """Whether its columnwise data is transposed."""
        return self.scale_block != BLOCK

    def buffers(self, shape: tuple[Size, ...]) -> Buffers:
        rows, columns = rows_and_columns(shape)
        described: Buffers = {}
        if self.rowwise:
            described["data"] = ((rows, columns), self.dtype)
            described["scale_inv"] = (scale_shape(rows, columns, self.swizzled), torch.uint8)
        if self.columnwise:
            scales = scale_shape(columns, rows, self.swizzled)
            data, scale_inv = columnwise_names(self.scale_block, self.two_d)
            described[data] = (transposed(rows, columns) if self.turns else (rows, columns), self.dtype)
            described[scale_inv] = (scales if self.turns or self.swizzled else scales[::-1], torch.uint8)
        return described

    def launches(self, itemsize: int) -> list[dict[str, bool]]:
        return super().launches(itemsize if self.turns else 0)
