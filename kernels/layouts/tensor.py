"""FP8 with one scale a tensor [M, K], a group of [G, N, K], or a tensor of a stack: data, its transpose, the scales."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch

from te_dynamo.kernels.layouts.form import ScaledForm
from te_dynamo.kernels.layouts.sizes import Buffers, Size, rows_and_columns, transposed


@dataclasses.dataclass(frozen=True)
class TensorForm(ScaledForm):
    NAMES: ClassVar[tuple[str, ...]] = ("data", "transpose", "scale_inv")

    def buffers(self, shape: tuple[Size, ...], scales: Size = 1) -> Buffers:
        """data [M, K] if rowwise, transpose [K, M^16] if columnwise, scale_inv fp32 [scales]."""
        return self._of(rows_and_columns(shape), scales)

    def _of(self, shape: tuple[Size, ...], scales: Size) -> Buffers:
        described: Buffers = {}
        if self.rowwise:
            described["data"] = (shape, self.dtype)
        if self.columnwise:
            described["transpose"] = ((*shape[:-2], *transposed(*shape[-2:])), self.dtype)
        described["scale_inv"] = ((scales,), torch.float32)
        return described


@dataclasses.dataclass(frozen=True)
class GroupedForm(TensorForm):
    """The same of each group."""

    def buffers(self, shape: tuple[Size, ...], scales: Size = 0) -> Buffers:
        """data [G, N, K], transpose [G, K, N^16], scale_inv [G]."""
        return self._of(shape, shape[0])
