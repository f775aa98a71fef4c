"""The GEMM of tensor cores with block scales in Triton's interpreter: near the references, whose order of sums is another.

Run as a program, this file is the interpreted part: TRITON_INTERPRET must be set before Triton is imported.
"""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from helpers.kernels.gemms import (
    gemm_mxfp8,
    gemm_mxfp8_reference,
    gemm_nvfp4,
    gemm_nvfp4_reference,
    mxfp8_request,
    nvfp4_request,
)
from helpers.kernels.interpreter_process import run_in_interpreter

from te_dynamo.kernels.gemm import block_scales
from te_dynamo.kernels.gemm.multiply import multiply
from te_dynamo.kernels.gemm.request import Request
from te_dynamo.kernels.layouts.mxfp8 import MXFP8Form
from te_dynamo.kernels.layouts.nvfp4 import NVFP4Form
from te_dynamo.kernels.quantize.mxfp8 import quantize_mxfp8_reference
from te_dynamo.kernels.quantize.nvfp4 import quantize_nvfp4_reference
from te_dynamo.kernels.runtime.target import TARGETS, acting_as

SHAPES = [
    (128, 128, 128),
    (1, 48, 32),
    (140, 144, 272),  # two tiles by two, ragged on all sides
]


@pytest.mark.slow
def test_products_are_those_of_the_references() -> None:
    run_in_interpreter(__file__)


def main() -> None:
    from helpers.kernels import interpreted

    interpreted.install()
    block_scales.multiprocessor_count = lambda device: 2  # type: ignore[assignment]
    for target, (m, n, k) in itertools.product(("b200", "rtx5090"), SHAPES):
        with acting_as(TARGETS[target]):
            generator = torch.Generator().manual_seed(m)
            a, b, bias = (torch.randn(size, generator=generator).bfloat16() for size in ((m, k), (n, k), (n,)))
            check_mxfp8(a, b, bias, turned=target == "b200")
            check_nvfp4(a, b, bias)


def check_mxfp8(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor, turned: bool) -> None:
    """turned: also operands whose blocks lie along columns, whose rows are whole 16 bytes."""
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    columns = ((False, False), (True, False), (False, True), (True, True)) if turned else ((False, False),)
    for (a_columnwise, b_columnwise), swizzled in itertools.product(columns, (False, True)):
        if (a_columnwise and a.shape[0] % 16) or (b_columnwise and b.shape[0] % 16):
            continue
        left, right = a.t() if a_columnwise else a, b.t() if b_columnwise else b
        operands = (
            *quantize_mxfp8_reference(left, MXFP8Form(e5m2, not a_columnwise, a_columnwise, 32, swizzled)),
            *quantize_mxfp8_reference(right, MXFP8Form(e4m3, not b_columnwise, b_columnwise, 32, swizzled)),
            bias,
            torch.float32,
            a_columnwise,
            b_columnwise,
        )
        torch.testing.assert_close(gemm_mxfp8(*operands), gemm_mxfp8_reference(*operands), rtol=1e-5, atol=1e-4)
        if a.shape[0] == 1 and not swizzled:
            check_sum(mxfp8_request(*operands))


def check_nvfp4(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor) -> None:
    for swizzled, given in itertools.product((False, True), (bias, None)):
        left = quantize_nvfp4_reference(a, NVFP4Form(True, False, swizzled=swizzled))
        right = quantize_nvfp4_reference(b, NVFP4Form(True, False, swizzled=swizzled))
        operands = (*left, *right, given, torch.float32)
        torch.testing.assert_close(gemm_nvfp4(*operands), gemm_nvfp4_reference(*operands), rtol=1e-5, atol=1e-4)
        if a.shape[0] == 1 and not swizzled:
            check_sum(nvfp4_request(*operands))


def check_sum(r: Request) -> None:
    """Bit for bit the product and an addition, into a buffer and into the addend."""
    for dtype in (torch.float32, torch.bfloat16):
        r = dataclasses.replace(r, out_dtype=dtype)
        addend = torch.randn(r.shape).to(dtype)
        expected, fused = multiply(r) + addend, dataclasses.replace(r, addend=addend)
        assert torch.equal(multiply(fused), expected)
        assert multiply(fused, out=addend) is addend and torch.equal(addend, expected)


if __name__ == "__main__":
    main()
