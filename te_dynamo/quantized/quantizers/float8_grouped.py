"""FP8 with one scale a group: the weights of a mixture's experts, each matrix in current scaling by itself."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from te_dynamo.errors import InputError
from te_dynamo.kernels.layouts.tensor import GroupedForm
from te_dynamo.quantized.quantizers.float8 import OneScaleQuantizer


@dataclasses.dataclass(frozen=True, eq=False)
class Float8GroupedQuantizer(OneScaleQuantizer):
    """x[g] ~ data[g] * scale_inv[g], with scale_inv[g] = amax(x[g]) / fmax, of x [G, N, K].

    Columnwise data is each group's transpose. The fields are those of Float8CurrentScalingQuantizer.
    """

    storage: ClassVar[str] = "Float8GroupedTensorStorage"
    reads_as_matrix: ClassVar[bool] = False

    def _using(self, *fields: Any) -> Float8GroupedQuantizer:
        return Float8GroupedQuantizer(*fields)

    def check_shape(self, shape: tuple[int, ...]) -> None:
        if len(shape) != 3:
            raise InputError(f"Float8GroupedQuantizer: expected a tensor [G, N, K], got the shape {list(shape)}")

    def columns_are_rows(self) -> bool:
        return True

    def form(self) -> GroupedForm:
        return GroupedForm(*self._form_fields())

    def _format(self) -> tuple[str, str]:
        return f"grouped {self.fp8_format}", f"grouped FP8 ({self.fp8_format})"
