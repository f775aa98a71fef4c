"""te.quantize_stacked: where each tensor lies in the stack, and what does not stack."""

from __future__ import annotations

import pytest
import torch
from helpers.graphs.graph_builder import te
from helpers.kernels.kernel_cases import assert_same_bits

from te_dynamo.dialect.stacked import places_in_stack
from te_dynamo.errors import QuantizationError
from te_dynamo.quantized.quantizers import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Quantizer,
)

KEPT = (
    Float8CurrentScalingQuantizer(),
    Float8BlockQuantizer(columnwise=False, block_dims=2),
    Float8BlockQuantizer(columnwise=False),
    MXFP8Quantizer(columnwise=False, block_dims=2),
    MXFP8Quantizer(columnwise=False, swizzled=True),
    MXFP8Quantizer(columnwise=False, scale_block=128),
)


@pytest.mark.parametrize("quantizer", KEPT, ids=lambda quantizer: quantizer.describe())
def test_each_tensor_has_its_place(quantizer: Quantizer) -> None:
    torch.manual_seed(0)
    rows = [256, 128, 384]
    weights = [torch.randn(n, 272, dtype=torch.bfloat16) for n in rows]
    stack = te.quantize_stacked.default(weights, quantizer, False)
    for index, weight in enumerate(weights):
        places = places_in_stack(quantizer, rows, index)
        parts = [b.narrow(*places[name]) for name, b in zip(quantizer.buffer_names(), stack, strict=True)]
        assert_same_bits(parts, te.quantize.default(weight, quantizer), index)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("quantizer", [Float8CurrentScalingQuantizer(), Float8BlockQuantizer(), MXFP8Quantizer()])
def test_what_does_not_stack(quantizer: Quantizer, device: str) -> None:
    x = torch.empty(128, 64, dtype=torch.bfloat16, device=device)
    for xs, message in (
        ([x, x[:96]], r"multiples of 128, got \(128, 96\)"),
        ([x] * 4, "expected 2 to 3 segments"),
        ([x, x[:, :32]], "equally many columns"),
        ([x, x.float()], "of one dtype"),
    ):
        with pytest.raises(ValueError, match=message):
            te.quantize_stacked.default(xs, quantizer, False)


def test_a_format_that_has_no_stacks() -> None:
    x = torch.empty(128, 64, dtype=torch.bfloat16)
    with pytest.raises(QuantizationError, match=r"nvfp4.*: no GEMM multiplies a stack of it"):
        te.quantize_stacked.default([x, x], NVFP4Quantizer(), False)
