"""FP8 with one scale a row, of x and of x^T each by itself (the table: kernels/quantize/float8_rowwise.py), also by groups."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch

from te_dynamo.kernels.layouts.form import ScaledForm
from te_dynamo.kernels.layouts.sizes import Buffers, Size, rows_and_columns, transposed


@dataclasses.dataclass(frozen=True)
class RowForm(ScaledForm):
    NAMES: ClassVar[tuple[str, ...]] = ("data", "scale_inv", "transpose", "columnwise_scale_inv")

    def buffers(self, shape: tuple[Size, ...]) -> Buffers:
        return self._of(rows_and_columns(shape))

    def _of(self, size: tuple[Size, ...], groups: tuple[Size, ...] = ()) -> Buffers:
        rows, columns = size
        described: Buffers = {}
        if self.rowwise:
            described["data"] = ((*groups, rows, columns), self.dtype)
            described["scale_inv"] = ((*groups, rows), torch.float32)
        if self.columnwise:
            described["transpose"] = ((*groups, *transposed(rows, columns)), self.dtype)
            described["columnwise_scale_inv"] = ((*groups, columns), torch.float32)
        return described


@dataclasses.dataclass(frozen=True)
class GroupedRowForm(RowForm):
    """The same of each matrix of [G, N, K]."""

    def buffers(self, shape: tuple[Size, ...]) -> Buffers:
        return self._of(shape[1:], shape[:1])


@dataclasses.dataclass(frozen=True)
class GroupColumnsForm(RowForm):
    """The columns of [M, K] in so many groups of rows, each with scales of its own."""

    groups: Size = 1

    def buffers(self, shape: tuple[Size, ...]) -> Buffers:
        size = rows_and_columns(shape)
        return {
            "transpose": (transposed(*size), self.dtype),
            "columnwise_scale_inv": ((self.groups, size[1]), torch.float32),
        }
