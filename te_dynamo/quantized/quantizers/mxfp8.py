"""MXFP8: FP8 with a power-of-two scale for each 32 values (rules: docs/numerics.md; OCP Microscaling Formats 1.0)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, ClassVar, Literal

from te_dynamo.errors import QuantizationError
from te_dynamo.kernels.layouts.mxfp8 import BLOCK, MXFP8Form, columnwise_names
from te_dynamo.quantized.quantizers.base import Quantizer
from te_dynamo.quantized.quantizers.float8 import Float8Quantizer
from te_dynamo.quantized.quantizers.formats import FP8_DTYPES


@dataclasses.dataclass(frozen=True, eq=False)
class MXFP8Quantizer(Float8Quantizer):
    """x ~ data * 2^(scale_inv - 127) of its block, the exponent that of amax(block) / fmax, rounded up.

    fp8_format: "e4m3" (largest value 448) or "e5m2" (57344).
    scale_block: 32, or 128 for four equal scales in a row: still MXFP8, and what the 1x128 kernels of Hopper read too.
    block_dims: 1 for blocks along the contracted dimension; 2 for blocks of as many rows, weights: still MXFP8, the scale once for each row.
    swizzled: scales in the order in which Blackwell's tensor cores read them.

    Buffers of x read as [M, K]; scales are E8M0 codes (255 is NaN), held as uint8 (^n: rounded up, the padding zero):

        data             [M, K]                           scale_inv             (M^128, ceil(K/32)^4)
        columnwise_data  32: [M, K], 128: [K, M^16]       columnwise_scale_inv  32: (ceil(M/32)^4, K^128), 128: (K^128, ceil(M/32)^4)

    Swizzled, scales of such a shape (R, S), of columns in blocks of 32 (S, R), are (R / 4, S, 4), in tiles of 128 by 4 (kernels/layouts/tiled_scales.py).

    With scale_block=32 columns are not transposed; with 128 they are the rows of x^T. 1D columns are quantized on their own. 2D columns are the
    same values: of blocks of 32 `data` is both usages', and there is no columnwise_data.
    """

    storage: ClassVar[str] = "MXFP8TensorStorage"
    fused_producers: ClassVar[bool] = True
    stacks: ClassVar[Literal["blocks"]] = "blocks"

    scale_block: int = 32
    block_dims: int = 1
    swizzled: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scale_block not in (32, 128):
            raise QuantizationError(
                f"scale_block: expected 32 (the format's own block) or 128 (four equal scales), got {self.scale_block!r}"
            )
        if self.block_dims not in (1, 2):
            raise QuantizationError(
                f"block_dims: expected 1 (blocks of 1x{self.scale_block}) or 2 (blocks of {self.scale_block}x{self.scale_block}), "
                f"got {self.block_dims!r}"
            )

    def scaling(self) -> Literal["1x32", "1x128"]:
        return "1x32" if self.scale_block == BLOCK or self.swizzled else "1x128"

    def recipe(self) -> tuple[str, dict[str, Any]]:
        return "mxfp8", {"scale_block": self.scale_block, "weight_block_dims": self.block_dims}

    def transposes_columns(self) -> bool:
        return self.scale_block != BLOCK

    def columns_are_rows(self) -> bool:
        return self.block_dims == 2

    def rows_of_a_scale(self) -> int:
        return self.scale_block if self.block_dims == 2 else 1

    def experts_begin_at(self) -> int:
        return self.scale_block

    def no_groups_reason(self) -> str:
        return ""

    def for_groups(self, rowwise: bool, columnwise: bool) -> Quantizer:
        return self.with_usage(rowwise, columnwise)

    def _using(self, *fields: Any) -> MXFP8Quantizer:
        return MXFP8Quantizer(*fields)

    def for_block_scales(self) -> MXFP8Quantizer:
        return MXFP8Quantizer(self.rowwise, self.columnwise, self.fp8_format, self.scale_block, self.block_dims, True)

    def form(self) -> MXFP8Form:
        options = self.rowwise, self.columnwise, self.scale_block, self.swizzled, self.block_dims == 2
        return MXFP8Form(FP8_DTYPES[self.fp8_format], *options)

    def _operand_names(self, columnwise: bool) -> tuple[str, ...]:
        return columnwise_names(self.scale_block, self.block_dims == 2) if columnwise else MXFP8Form.NAMES[:2]

    def _format(self) -> tuple[str, str]:
        element = "" if self.fp8_format == "e4m3" else f" {self.fp8_format}"
        block = "" if self.scale_block == BLOCK else f" 1x{self.scale_block}"
        return f"mxfp8{element}{block}", f"MXFP8{element}"

    def _settings(self) -> Iterable[str]:
        squares = (f"{self.scale_block}x{self.scale_block}",) * (self.block_dims == 2)
        return *squares, *("swizzled",) * self.swizzled
