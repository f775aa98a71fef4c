"""Every quantizer in every usage, for the tests of quantizers, storages, quantized tensors and protos."""

from __future__ import annotations

import torch

from te_dynamo import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8RowwiseQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Quantizer,
)

USAGES = [(True, True), (True, False), (False, True)]

CONFIGURATIONS: list[Quantizer] = [
    Float8CurrentScalingQuantizer(),
    Float8CurrentScalingQuantizer(fp8_format="e5m2", power_of_two_scale=True, amax_epsilon=1e-3),
    Float8BlockQuantizer(),
    Float8BlockQuantizer(block_dims=2),
    Float8BlockQuantizer(fp8_format="e5m2", power_of_two_scale=False),
    Float8RowwiseQuantizer(),
    Float8RowwiseQuantizer(fp8_format="e5m2", power_of_two_scale=True, amax_epsilon=1e-3),
    MXFP8Quantizer(),
    MXFP8Quantizer(fp8_format="e5m2"),
    MXFP8Quantizer(scale_block=128),
    MXFP8Quantizer(block_dims=2),
    MXFP8Quantizer(scale_block=128, block_dims=2),
    NVFP4Quantizer(),
    NVFP4Quantizer(block_dims=2),
    NVFP4Quantizer(hadamard=True, stochastic_rounding=True),
    MXFP8Quantizer(swizzled=True),
    MXFP8Quantizer(scale_block=128, swizzled=True),
    MXFP8Quantizer(block_dims=2, swizzled=True),
    NVFP4Quantizer(hadamard=True, swizzled=True),
]

QUANTIZERS = [q.with_usage(rowwise, columnwise) for q in CONFIGURATIONS for rowwise, columnwise in USAGES]

ONE_EACH = [next(q for q in CONFIGURATIONS if type(q) is cls) for cls in dict.fromkeys(map(type, CONFIGURATIONS))]


def name(value: object) -> str:
    """A test's id: "mxfp8-row+column"."""
    return value.describe().replace("[", "-").strip("]") if isinstance(value, Quantizer) else str(value)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal in shape, dtype and every byte, NaN included."""
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def key(seed: int = 0) -> torch.Generator:
    """The generator of a stochastic rounding."""
    return torch.Generator().manual_seed(seed)
