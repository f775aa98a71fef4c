"""FP8 with one scale a row, of x and of x^T each by itself (the table: kernels/quantize/float8_rowwise.py)."""

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
        return self._of((), *rows_and_columns(shape))

    def _of(self, groups: tuple[Size, ...], rows: Size, columns: Size) -> Buffers:
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
    """The same of each group of [G, N, K]."""

    def buffers(self, shape: tuple[Size, ...]) -> Buffers:
        return self._of(shape[:1], *shape[1:])
