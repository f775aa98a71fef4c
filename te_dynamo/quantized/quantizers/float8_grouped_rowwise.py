"""FP8 with an fp32 scale for each row of each group: a mixture's experts, and the columns of their tokens."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from te_dynamo.errors import InputError
from te_dynamo.kernels.layouts.row import GroupColumnsForm, GroupedRowForm
from te_dynamo.quantized.quantizers.float8 import RowScalesQuantizer


@dataclasses.dataclass(frozen=True, eq=False)
class Float8GroupedRowwiseQuantizer(RowScalesQuantizer):
    """Each x[g] of x [G, N, K] as Float8RowwiseQuantizer holds it, whose fields these are; columnwise data is each group's transpose."""

    storage: ClassVar[str] = "Float8GroupedRowwiseTensorStorage"
    reads_as_matrix: ClassVar[bool] = False

    def _using(self, *fields: Any) -> Float8GroupedRowwiseQuantizer:
        return Float8GroupedRowwiseQuantizer(*fields)

    def check_shape(self, shape: tuple[int, ...]) -> None:
        if len(shape) != 3:
            raise InputError(f"Float8GroupedRowwiseQuantizer: expected a tensor [G, N, K], got the shape {list(shape)}")

    def form(self) -> GroupedRowForm:
        return GroupedRowForm(*self._form_fields())

    def _format(self) -> tuple[str, str]:
        return f"grouped {self.fp8_format} by rows", f"grouped FP8 ({self.fp8_format})"


@dataclasses.dataclass(frozen=True, eq=False)
class GroupColumnsQuantizer(RowScalesQuantizer):
    """The columns of x [M, K] in so many groups of rows, each with scales of its own: transpose [K, M^16], columnwise_scale_inv [groups, K].

    No tensor is held so: it describes what te.quantize_group_columns gives to wgrad.
    """

    groups: int = 1

    def _using(self, *fields: Any) -> GroupColumnsQuantizer:
        return GroupColumnsQuantizer(*fields)

    def form(self) -> GroupColumnsForm:
        return GroupColumnsForm(*self._form_fields(), self.groups)
