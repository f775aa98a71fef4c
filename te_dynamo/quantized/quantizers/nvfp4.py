"""NVFP4: 4-bit values with an e4m3 scale for each 16 and an fp32 amax for the tensor (rules: docs/numerics.md)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, ClassVar, Literal

from te_dynamo.errors import QuantizationError
from te_dynamo.kernels.layouts.nvfp4 import NVFP4Form
from te_dynamo.quantized.quantizers.base import Quantizer


@dataclasses.dataclass(frozen=True, eq=False)
class NVFP4Quantizer(Quantizer):
    """x ~ e2m1(data) * e4m3(scale_inv) * amax / 2688, scale_inv that of its block of 16.

    hadamard: rotate the columnwise operand by a random 16x16 Hadamard matrix before it is quantized.
    stochastic_rounding: round to one of the two neighbours with the probability of its nearness, from random bits that
        are given; for gradients.
    block_dims: 1 for blocks of 16 along the contracted dimension; 2 for 16x16, the same for rows and columns; for weights.
    swizzled: scales in the order in which Blackwell's tensor cores read them.

    Buffers of x read as [M, K], two values a byte, the even one in the low nibble (^n: rounded up, the padding zero):

        data             [M, K^32 / 2]    scale_inv             (M^128, ceil(K/16)^4)    amax             [1]
        columnwise_data  [K, M^32 / 2]    columnwise_scale_inv  (K^128, ceil(M/16)^4)    columnwise_amax  [1]

    data and scales are uint8, the scales the bits of e4m3; columns are the rows of x^T. Swizzled, scales of shape (R, S) are
    (R / 4, S, 4), in tiles of 128 by 4 (kernels/layouts/tiled_scales.py).
    """

    storage: ClassVar[str] = "NVFP4TensorStorage"

    hadamard: bool = False
    stochastic_rounding: bool = False
    block_dims: int = 1
    swizzled: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block_dims not in (1, 2):
            raise QuantizationError(
                f"block_dims: expected 1 (blocks of 1x16) or 2 (blocks of 16x16), got {self.block_dims!r}"
            )
        if self.block_dims == 2 and self.hadamard:
            raise QuantizationError(
                "NVFP4Quantizer: block_dims=2 with hadamard=True: 16x16 blocks share scales between rows and columns, so columns "
                "cannot be rotated; hold the weight in 2D or rotate both operands of wgrad"
            )

    def scaling(self) -> Literal["1x16"]:
        return "1x16"

    def recipe(self) -> tuple[str, dict[str, Any]]:
        return "nvfp4", {"weight_block_dims": self.block_dims}

    def needs_random(self) -> bool:
        return self.stochastic_rounding

    def _using(self, *fields: Any) -> NVFP4Quantizer:
        return NVFP4Quantizer(*fields)

    def for_block_scales(self) -> NVFP4Quantizer:
        rounding = self.hadamard, self.stochastic_rounding
        return NVFP4Quantizer(self.rowwise, self.columnwise, *rounding, self.block_dims, True)

    def form(self) -> NVFP4Form:
        rounding = self.hadamard, self.stochastic_rounding
        return NVFP4Form(self.rowwise, self.columnwise, self.block_dims == 2, *rounding, self.swizzled)

    def _format(self) -> tuple[str, str]:
        return "nvfp4", "NVFP4"

    def _settings(self) -> Iterable[str]:
        settings = (
            ("16x16", self.block_dims == 2),
            ("hadamard", self.hadamard),
            ("stochastic", self.stochastic_rounding),
            ("swizzled", self.swizzled),
        )
        return (name for name, on in settings if on)
