"""FP8 with an fp32 scale for each row that a GEMM reads (rules: docs/numerics.md, Rowwise scaling)."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Literal

from te_dynamo.kernels.layouts.row import RowForm
from te_dynamo.quantized.quantizers.float8 import RowScalesQuantizer
from te_dynamo.quantized.quantizers.float8_grouped_rowwise import Float8GroupedRowwiseQuantizer, GroupColumnsQuantizer


@dataclasses.dataclass(frozen=True, eq=False)
class Float8RowwiseQuantizer(RowScalesQuantizer):
    """x ~ data * scale_inv of its row, with scale_inv = amax(row) / fmax.

    fp8_format: "e4m3" (largest value 448) or "e5m2" (57344).
    power_of_two_scale: clear the scales' mantissa bits.
    amax_epsilon: a row's amax is at least this.

    Buffers of x read as [M, K] (^n: rounded up to a multiple of n, the padding zero):

        data         [M, K]       scale_inv               [M]
        transpose    [K, M^16]    columnwise_scale_inv    [K]

    Columns are the rows of x^T, quantized on their own.
    """

    storage: ClassVar[str] = "Float8RowwiseTensorStorage"
    fused_producers: ClassVar[bool] = True
    stacks: ClassVar[Literal["rows"]] = "rows"

    def _using(self, *fields: Any) -> Float8RowwiseQuantizer:
        return Float8RowwiseQuantizer(*fields)

    def no_groups_reason(self) -> str:
        return ""

    def for_groups(self, rowwise: bool, columnwise: bool) -> Float8GroupedRowwiseQuantizer:
        rule = self.fp8_format, self.power_of_two_scale, self.amax_epsilon
        return Float8GroupedRowwiseQuantizer(rowwise, columnwise, *rule)

    def for_group_columns(self, groups: Any) -> GroupColumnsQuantizer:
        rule = self.fp8_format, self.power_of_two_scale, self.amax_epsilon
        return GroupColumnsQuantizer(False, True, *rule, groups)

    def form(self) -> RowForm:
        return RowForm(*self._form_fields())
