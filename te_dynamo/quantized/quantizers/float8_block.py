"""FP8 with an fp32 scale for each block of 1x128 or 128x128 values (rules: docs/numerics.md, Float8 block scaling)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, ClassVar, Literal

from te_dynamo.errors import QuantizationError
from te_dynamo.kernels.layouts.block import BLOCK, BlockForm
from te_dynamo.quantized.quantizers.base import Quantizer
from te_dynamo.quantized.quantizers.float8 import Float8Quantizer
from te_dynamo.quantized.quantizers.formats import FP8_DTYPES, check_amax_epsilon, epsilon_setting


@dataclasses.dataclass(frozen=True, eq=False)
class Float8BlockQuantizer(Float8Quantizer):
    """x ~ data * scale_inv of its block, with scale_inv = amax(block) / fmax.

    fp8_format: "e4m3" (largest value 448) or "e5m2" (57344).
    block_dims: 1 for blocks of 128 along the contracted dimension, activations and gradients; 2 for 128x128, weights.
    power_of_two_scale: clear the scales' mantissa bits.
    amax_epsilon: a block's amax is at least this.

    Buffers of x read as [M, K] (^n: rounded up to a multiple of n, the padding zero):

        data                 [M, K]       scale_inv             1D (ceil(K/128), M^4), 2D (ceil(M/128), ceil(K/128)^4)
        transpose            [K, M^16]    columnwise_scale_inv  1D (ceil(M/128), K^4), 2D (ceil(K/128), ceil(M/128)^4)

    1D columns are quantized on their own; 2D columns are the transposed rows.
    """

    storage: ClassVar[str] = "Float8BlockTensorStorage"
    fused_producers: ClassVar[bool] = True
    stacks: ClassVar[Literal["blocks"]] = "blocks"

    block_dims: int = 1
    power_of_two_scale: bool = True
    amax_epsilon: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block_dims not in (1, 2):
            raise QuantizationError(
                f"block_dims: expected 1 (blocks of 1x128) or 2 (blocks of 128x128), got {self.block_dims!r}"
            )
        check_amax_epsilon(self.amax_epsilon)

    def scaling(self) -> Literal["1x128", "128x128"]:
        return "1x128" if self.block_dims == 1 else "128x128"

    def recipe(self) -> tuple[str, dict[str, Any]]:
        options = {"weight_block_dims": self.block_dims, "power_of_two_scales": self.power_of_two_scale}
        return "float8_block_scaling", options

    def experts_begin_at(self) -> int:
        return BLOCK

    def no_groups_reason(self) -> str:
        return "" if self.block_dims == 1 else "blocks of 128 rows would be two experts'"

    def for_groups(self, rowwise: bool, columnwise: bool) -> Quantizer:
        return self.with_usage(rowwise, columnwise)

    def _using(self, *fields: Any) -> Float8BlockQuantizer:
        return Float8BlockQuantizer(*fields)

    def form(self) -> BlockForm:
        usages = self.rowwise, self.columnwise
        options = self.block_dims == 2, self.power_of_two_scale, self.amax_epsilon
        return BlockForm(FP8_DTYPES[self.fp8_format], *usages, *options)

    def columns_are_rows(self) -> bool:
        return self.block_dims == 2

    def rows_of_a_scale(self) -> int:
        return BLOCK if self.block_dims == 2 else 1

    def _format(self) -> tuple[str, str]:
        return f"{self.fp8_format} {self.scaling()}", f"FP8 ({self.fp8_format})"

    def _settings(self) -> Iterable[str]:
        scales = ("fp32 scales",) * (not self.power_of_two_scale)
        return *scales, *epsilon_setting(self.amax_epsilon)
