"""FP8 with one scale for 1x128 or 128x128 values (the tables: kernels/quantize/float8_block.py)."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch

from te_dynamo.kernels.layouts.form import Form
from te_dynamo.kernels.layouts.sizes import Buffers, Size, blocks_of, round_up, rows_and_columns, transposed

BLOCK = 128


def scale_shape(rows: Size, k: Size, two_d: bool) -> tuple[Size, Size]:
    """The shape of the scales of data [rows, k]. In 1D the contracted blocks come first, in 2D the order is that of the data."""
    blocks = blocks_of(k, BLOCK)
    return (blocks_of(rows, BLOCK), round_up(blocks, 4)) if two_d else (blocks, round_up(rows, 4))


@dataclasses.dataclass(frozen=True)
class BlockForm(Form):
    """two_d: blocks of 128x128, and 1x128 otherwise. power_of_two, eps: as ScaledForm's."""

    NAMES: ClassVar[tuple[str, ...]] = ("data", "scale_inv", "transpose", "columnwise_scale_inv")

    two_d: bool
    power_of_two: bool = True
    eps: float = 0.0

    def buffers(self, shape: tuple[Size, ...]) -> Buffers:
        rows, columns = rows_and_columns(shape)
        described: Buffers = {}
        if self.rowwise:
            described["data"] = ((rows, columns), self.dtype)
            described["scale_inv"] = (scale_shape(rows, columns, self.two_d), torch.float32)
        if self.columnwise:
            described["transpose"] = (transposed(rows, columns), self.dtype)
            described["columnwise_scale_inv"] = (scale_shape(columns, rows, self.two_d), torch.float32)
        return described

    def constants(self) -> dict[str, Any]:
        rule = {"EPS": float(self.eps), "POWER_OF_TWO": self.power_of_two}
        return {**super().constants(), **rule, "SCALING": "128x128" if self.two_d else "1x128"}
