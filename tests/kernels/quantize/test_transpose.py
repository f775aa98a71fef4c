"""Columnwise codes made of rowwise ones: the bits that quantizing with both usages writes."""

from __future__ import annotations

import pytest
import torch
from helpers.kernels.compiled_quantize import assert_no_spills, compile_kernel
from helpers.kernels.kernel_cases import (
    DTYPES,
    FP8_DTYPES,
    INPUT_KINDS,
    RAGGED_SHAPES,
    assert_same_bits,
    gpu,
    make_input,
    needs_cuda,
    run_poisoned,
)

from te_dynamo.kernels.layouts.tensor import TensorForm
from te_dynamo.kernels.quantize import transpose as kernels
from te_dynamo.kernels.quantize.current import CAST_TILE, quantize, quantize_reference


@pytest.mark.parametrize("fp8_dtype", FP8_DTYPES)
@pytest.mark.parametrize("shape", [(1, 32), (17, 300), (2, 9, 48)])
def test_reference_is_the_columnwise_copy(shape, fp8_dtype):
    x = make_input("normal", shape, torch.bfloat16)
    data, transposed, _ = quantize_reference(x, TensorForm(fp8_dtype, True, True))
    assert_same_bits([kernels.transpose_reference(data)], [transposed])


@pytest.mark.parametrize("tile", [CAST_TILE, (64, 64, 4)])
def test_kernel_moves_words_and_does_not_spill(tile, tmp_path):
    compiled = compile_kernel(kernels.transpose_kernel, {"BLOCK_M": tile[0], "BLOCK_K": tile[1]}, tile[2])
    ptx = compiled.asm["ptx"]
    assert "st.global.v4" in ptx and "shared.b8" not in ptx
    assert_no_spills(compiled, tmp_path)


@gpu
@needs_cuda
@pytest.mark.parametrize("fp8_dtype", FP8_DTYPES)
@pytest.mark.parametrize("shape", [*RAGGED_SHAPES, (0, 64), (2048, 4096), (130, 28672)])
@pytest.mark.parametrize("kind", INPUT_KINDS)
def test_kernel_is_the_columnwise_copy(shape, fp8_dtype, kind):
    if 0 in shape and kind != "zeros":
        pytest.skip("an empty tensor has one kind")
    for dtype in DTYPES:
        x = make_input(kind, shape, dtype, "cuda")
        data, transposed, _ = quantize(x, TensorForm(fp8_dtype, True, True))
        assert_same_bits([kernels.transpose(data)], [transposed])


@gpu
@needs_cuda
@pytest.mark.parametrize("shape", [(303, 300), (2048, 4096)])
def test_kernel_writes_every_element(shape):
    data = torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda").view(torch.float8_e5m2)
    run_poisoned(lambda: [kernels.transpose(data)])
