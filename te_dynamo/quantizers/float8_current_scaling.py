"""FP8 with one scale a tensor, from the tensor's present amax (`notes`: Float8 current scaling in docs/architecture.md)."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch

from te_dynamo.errors import QuantizationError
from te_dynamo.quantizers.base import Quantizer

__all__ = ["FP8_DTYPES", "Float8CurrentScalingQuantizer"]

FP8_DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}

TRANSPOSE_ALIGNMENT = 16
"""The row stride of `transpose` is a multiple of this many bytes, as the GEMM's tensor copies need."""


@dataclasses.dataclass(frozen=True)
class Float8CurrentScalingQuantizer(Quantizer):
    """x ~ data * scale_inv, with scale_inv = amax(x) / fmax.

    fp8_format: "e4m3" (largest value 448) or "e5m2" (57344).
    power_of_two_scale: clear the scale's mantissa bits.
    amax_epsilon: amax is at least this.
    """

    fp8_format: str = "e4m3"
    power_of_two_scale: bool = False
    amax_epsilon: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.fp8_format not in FP8_DTYPES:
            raise QuantizationError(f"fp8_format: expected one of {sorted(FP8_DTYPES)}, got {self.fp8_format!r}")
        if not (math.isfinite(self.amax_epsilon) and self.amax_epsilon >= 0):
            raise QuantizationError(f"amax_epsilon: expected a finite number >= 0, got {self.amax_epsilon}")

    @property
    def dtype(self) -> torch.dtype:
        """The float8 dtype of the data."""
        return FP8_DTYPES[self.fp8_format]

    def _describe_buffers(self, shape: tuple[int, ...]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        self.check_shape(shape)
        columns = shape[-1]
        rows = math.prod(shape[:-1])
        dtype = FP8_DTYPES[
            self.fp8_format
        ]  # not self.dtype: Dynamo, tracing this, cannot look a property up on a value
        buffers: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        if self.rowwise:
            buffers["data"] = ((rows, columns), dtype)
        if self.columnwise:
            padded = (rows + TRANSPOSE_ALIGNMENT - 1) // TRANSPOSE_ALIGNMENT * TRANSPOSE_ALIGNMENT
            buffers["transpose"] = ((columns, padded), dtype)
        buffers["scale_inv"] = ((1,), torch.float32)
        return buffers

    def _storage_metadata(self, shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Any]:
        return {"cls": "Float8TensorStorage", "kwargs": {"shape": shape, "dtype": dtype, "quantizer": self}}

    def operand(self, buffers: list[torch.Tensor], columnwise: bool) -> tuple[torch.Tensor, torch.Tensor]:
        if not (self.columnwise if columnwise else self.rowwise):
            wanted = "columnwise" if columnwise else "rowwise"
            raise QuantizationError(f"{wanted} data of {self.describe()} was never allocated: switch the usage on")
        return buffers[int(self.rowwise) if columnwise else 0], buffers[-1]

    def describe(self) -> str:
        pow2 = ", pow2" if self.power_of_two_scale else ""
        return f"{self.fp8_format}[{self._usage_text()}{pow2}]"
