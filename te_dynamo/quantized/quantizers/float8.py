"""What the FP8 quantizers share: a format of their elements, and with one scale, or one a row, its rule."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, Literal

import torch

from te_dynamo.errors import QuantizationError
from te_dynamo.quantized.quantizers.base import Quantizer
from te_dynamo.quantized.quantizers.formats import FP8_DTYPES, check_amax_epsilon, epsilon_setting


@dataclasses.dataclass(frozen=True, eq=False)
class Float8Quantizer(Quantizer):
    """fp8_format: "e4m3" (largest value 448) or "e5m2" (57344); QuantizationError for another."""

    fp8_format: str = "e4m3"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.fp8_format not in FP8_DTYPES:
            raise QuantizationError(f"fp8_format: expected one of {sorted(FP8_DTYPES)}, got {self.fp8_format!r}")

    @property
    def dtype(self) -> torch.dtype:
        """The float8 dtype of the data. Not for what Dynamo traces, which cannot look a property up on a value."""
        return FP8_DTYPES[self.fp8_format]


@dataclasses.dataclass(frozen=True, eq=False)
class ScaledQuantizer(Float8Quantizer):
    """fp32 scales, from present amaxes.

    power_of_two_scale: clear a scale's mantissa bits.
    amax_epsilon: an amax is at least this.
    """

    power_of_two_scale: bool = False
    amax_epsilon: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_amax_epsilon(self.amax_epsilon)

    def _form_fields(self) -> tuple[torch.dtype, bool, bool, bool, float]:
        """The fields of a ScaledForm."""
        usages = self.rowwise, self.columnwise
        return FP8_DTYPES[self.fp8_format], *usages, self.power_of_two_scale, self.amax_epsilon

    def _settings(self) -> Iterable[str]:
        return *("pow2",) * self.power_of_two_scale, *epsilon_setting(self.amax_epsilon)


@dataclasses.dataclass(frozen=True, eq=False)
class RowScalesQuantizer(ScaledQuantizer):
    """A scale for each row that a GEMM reads."""

    def scaling(self) -> Literal["row"]:
        return "row"

    def recipe(self) -> tuple[str, dict[str, Any]]:
        return "float8_rowwise", {"power_of_two_scales": self.power_of_two_scale}

    def _format(self) -> tuple[str, str]:
        return f"{self.fp8_format} by rows", f"FP8 ({self.fp8_format})"


@dataclasses.dataclass(frozen=True, eq=False)
class OneScaleQuantizer(ScaledQuantizer):
    """One scale for all values of a matrix."""

    def scaling(self) -> Literal["tensor"]:
        return "tensor"

    def recipe(self) -> tuple[str, dict[str, Any]]:
        return "float8_current_scaling", {"power_of_two_scales": self.power_of_two_scale}

    def _operand_names(self, columnwise: bool) -> tuple[str, ...]:
        return ("transpose" if columnwise else "data", "scale_inv")

    def _format(self) -> tuple[str, str]:
        return self.fp8_format, f"FP8 ({self.fp8_format})"
