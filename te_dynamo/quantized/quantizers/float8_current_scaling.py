"""FP8 with one scale a tensor, from the tensor's present amax (rules: docs/numerics.md)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, ClassVar, Literal

from te_dynamo.errors import QuantizationError
from te_dynamo.kernels.layouts.tensor import TensorForm
from te_dynamo.quantized.quantizers.base import Quantizer
from te_dynamo.quantized.quantizers.float8 import OneScaleQuantizer
from te_dynamo.quantized.quantizers.float8_grouped import Float8GroupedQuantizer


@dataclasses.dataclass(frozen=True, eq=False)
class Float8CurrentScalingQuantizer(OneScaleQuantizer):
    """x ~ data * scale_inv, with scale_inv = amax(x) / fmax.

    fp8_format: "e4m3" (largest value 448) or "e5m2" (57344).
    power_of_two_scale: clear the scale's mantissa bits.
    amax_epsilon: amax is at least this.
    one_pass: a compiled graph guesses the scale and reads x once, where the guess holds. The same bits.
    input_amax: of a weight from a file, the amax for which the file scales what it is multiplied with, 0 where it says none. Only a recipe
        with static_inputs reads it, by `read_input_amax`.
    """

    storage: ClassVar[str] = "Float8TensorStorage"

    one_pass: bool = False
    input_amax: float = 0.0

    one_scale: ClassVar[bool] = True
    fused_producers: ClassVar[bool] = True
    stacks: ClassVar[Literal["tensors"]] = "tensors"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.one_pass and not self.power_of_two_scale:
            raise QuantizationError(
                "one_pass: only a power of two can be guessed: it stays the same for many steps, while other scales change with every "
                "amax. Ask for power_of_two_scales=True too"
            )

    def _settings(self) -> Iterable[str]:
        return *super()._settings(), *("one pass",) * self.one_pass

    def _using(self, *fields: Any) -> Float8CurrentScalingQuantizer:
        return Float8CurrentScalingQuantizer(*fields)

    def read_input_amax(self) -> float:
        """From now on graphs compiled for this quantizer fit this input_amax alone."""
        self.__dict__["_amax_is_read"] = True
        return self.input_amax

    def compiles_as(self, other: Quantizer) -> bool:
        others = type(other) is type(self) and "_amax_is_read" not in self.__dict__
        return self == other or (others and self.value()[:-1] == other.value()[:-1])  # input_amax is the last field

    def columns_are_rows(self) -> bool:
        return True

    def no_groups_reason(self) -> str:
        return ""

    def for_groups(self, rowwise: bool, columnwise: bool) -> Float8GroupedQuantizer:
        return Float8GroupedQuantizer(rowwise, columnwise, self.fp8_format, self.power_of_two_scale, self.amax_epsilon)

    def form(self) -> TensorForm:
        return TensorForm(*self._form_fields())
