"""Tensor cores that apply the scales of blocks, where there are some: the kernels' numbers are those of the references."""

from __future__ import annotations

import itertools

import pytest
import torch
from helpers.kernels.gemm_operands import relative_error
from helpers.kernels.gemms import gemm_mxfp8, gemm_mxfp8_reference, gemm_nvfp4, gemm_nvfp4_reference
from helpers.kernels.kernel_cases import assert_same_bits
from helpers.kernels.nvfp4_cases import BOTH, KINDS, OPTIONS, kernel, make, reference

from te_dynamo.kernels.layouts.mxfp8 import MXFP8Form
from te_dynamo.kernels.quantize.mxfp8 import quantize_mxfp8, quantize_mxfp8_reference
from te_dynamo.kernels.runtime.target import target_of

HERE = torch.cuda.is_available() and target_of(torch.device("cuda")).has_block_scales
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HERE, reason="no tensor cores for scales of blocks here")]

SHAPES = [(128, 256, 256), (1, 48, 32), (303, 272, 400), (4096, 4096, 4096)]
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@pytest.mark.parametrize("shape", [(128, 256), (303, 300), (2000, 2000)], ids=str)
def test_swizzled_buffers_are_the_references(shape: tuple[int, int]) -> None:
    for kind, options in itertools.product(KINDS, OPTIONS):
        x = make(kind, shape, torch.bfloat16, "cuda")
        actual, expected = kernel(x, BOTH, options, swizzled=True), reference(x, BOTH, options, swizzled=True)
        assert_same_bits(actual, expected, (kind, options))
    for scale_block, usages in itertools.product((32, 128), ((True, True), (True, False), (False, True))):
        x = make("normal", shape, torch.bfloat16, "cuda")
        form = MXFP8Form(E4M3, *usages, scale_block, True)
        assert_same_bits(quantize_mxfp8(x, form), quantize_mxfp8_reference(x, form), form)


@pytest.mark.parametrize("swizzled", [True, False])
@pytest.mark.parametrize("m, n, k", SHAPES)
def test_mxfp8(m: int, n: int, k: int, swizzled: bool) -> None:
    a, b = make("normal", (m, k), torch.bfloat16, "cuda"), make("normal", (n, k), torch.bfloat16, "cuda", seed=1)
    bias = torch.randn(n, device="cuda")
    for by_columns in itertools.product((False, True), repeat=2):
        operands = []
        for value, fp8, columnwise in zip((a, b), (E5M2, E4M3), by_columns, strict=True):
            value = value.t().contiguous() if columnwise else value
            operands += quantize_mxfp8(value, MXFP8Form(fp8, not columnwise, columnwise, 32, swizzled))
        arguments = (*operands, bias, torch.float32, *by_columns)
        assert relative_error(gemm_mxfp8(*arguments), gemm_mxfp8_reference(*arguments)) < 1e-5


@pytest.mark.parametrize("swizzled", [True, False])
@pytest.mark.parametrize("m, n, k", SHAPES)
def test_nvfp4(m: int, n: int, k: int, swizzled: bool) -> None:
    a, b = make("normal", (m, k), torch.bfloat16, "cuda"), make("normal", (n, k), torch.bfloat16, "cuda", seed=1)
    for bias in (None, torch.randn(n, device="cuda")):
        operands = [t for v in (a, b) for t in kernel(v, (True, False), OPTIONS[0], swizzled=swizzled)]
        arguments = (*operands, bias, torch.float32)
        assert relative_error(gemm_nvfp4(*arguments), gemm_nvfp4_reference(*arguments)) < 1e-5
