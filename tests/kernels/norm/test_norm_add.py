"""x + residual, a norm of it and its quantization in one function."""

from __future__ import annotations

import pytest
import torch
from helpers.kernels.compiled_quantize import NOT_BY_ROWS, assert_no_spills, compile_kernel, reduction_layouts
from helpers.kernels.kernel_cases import (
    DTYPES,
    RAGGED_SHAPES,
    assert_same_bits,
    gpu,
    make_input,
    needs_cuda,
    run_poisoned,
)

from te_dynamo.kernels.layouts.tensor import TensorForm
from te_dynamo.kernels.norm import add as norm_add
from te_dynamo.kernels.norm import kernels, norm

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
OPTIONS = TensorForm(E4M3, True, True, False, 0.0)
RMS_MODES = ((False, False), (True, False), (False, True))  # cast_before_weight, zero_centered


def operands(shape, dtype, device="cpu"):
    x, residual = (make_input("normal", shape, dtype, device, seed=seed) for seed in (0, 1))
    weight, bias = (make_input("normal", shape[-1:], dtype, device, seed=seed) for seed in (2, 3))
    return x, residual, weight, bias


@pytest.mark.parametrize("keep_output", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_reference_is_an_addition_then_the_norm(dtype, keep_output):
    x, residual, weight, bias = operands((2, 9, 64), dtype)
    h = (x.float() + residual.float()).to(dtype)
    rms = (1e-5, True, False, OPTIONS, keep_output)
    actual = norm_add.add_rms_norm_quantize_reference(x, residual, weight, *rms)
    assert_same_bits(actual, [h, *norm.rms_norm_quantize_reference(h, weight, *rms)])
    layer = (1e-5, OPTIONS, keep_output)
    actual = norm_add.add_layer_norm_quantize_reference(x, residual, weight, bias, *layer)
    assert_same_bits(actual, [h, *norm.layer_norm_quantize_reference(h, weight, bias, *layer)])


@pytest.mark.one_fast_case
@pytest.mark.parametrize("layer", [False, True], ids=["rms", "layer"])
@pytest.mark.parametrize(
    "columns, dtype, residual, to",
    [
        (4096, "bf16", "bf16", "bf16"),
        (4096, "fp32", "bf16", "bf16"),  # autocast's: a product in bf16, added to a residual stream in fp32
        pytest.param(20000, "fp32", "bf16", "bf16", marks=pytest.mark.slow),
        pytest.param(32768, "bf16", "bf16", "bf16", marks=pytest.mark.slow),
        pytest.param(4096, "fp32", "fp32", "fp32", marks=pytest.mark.slow),
    ],
)
def test_statistics_add_up_as_those_of_the_norm_alone(columns, dtype, residual, to, layer, tmp_path):
    """Bit-equality needs one shape and one layout of the reductions; nothing spills, and memory is read 16 bytes at a time. The slow ones find a
    dtype or a width where one of these does not hold."""
    block, warps = kernels.row_block(columns, 4 if dtype == "fp32" else 2, layer)
    flags = {"LAYER": layer, "HAS_WEIGHT": True, "HAS_BIAS": layer, "CAST_BEFORE_WEIGHT": not layer}
    flags |= {"ZERO_CENTERED": False, "EPS_NORM": 1e-5, "ONE_BLOCK": columns <= block, "BLOCK": block}
    flags |= {"PARTIALS": 1024, "MODULATED": False, "ROUNDED_TO": to, **NOT_BY_ROWS}
    alone, fused = (
        compile_kernel(
            kernels.norm_rows_kernel,
            {**flags, "ADDS": adds, "QUANTIZE": adds, "STORES": dtype != to or not adds},
            warps,
            dtype,
            dtype,
            residual=residual,
            y=to,
        )
        for adds in (False, True)
    )
    assert reduction_layouts(fused) == reduction_layouts(alone) and len(reduction_layouts(fused)) == 1 + layer
    fused_ptx, alone_ptx = fused.asm["ptx"], alone.asm["ptx"]
    assert fused_ptx.count("fma.rn.f32") == alone_ptx.count("fma.rn.f32")  # none but those that the source asks for
    assert "st.global.v4" in fused_ptx
    assert ("cp.async.cg.shared.global" if columns <= block else "ld.global.v4") in fused_ptx
    assert_no_spills(fused, tmp_path)


@gpu
@needs_cuda
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [*RAGGED_SHAPES, (33, 16384), (9, 20000), (2050, 4096)])
def test_kernel_equals_an_addition_then_the_norms_kernel(shape, dtype):
    """Of an addition by torch, whose h is the residual stream of the unfused graph."""
    x, residual, weight, bias = operands(shape, dtype, "cuda")
    h = x + residual
    for options in (OPTIONS, TensorForm(E5M2, False, True, True, 0.0), TensorForm(E4M3, True, False, False, 1.0)):
        for keep_output in (False, True):
            for w, mode in ((None, RMS_MODES[1]), *((weight, mode) for mode in RMS_MODES)):
                actual = norm_add.add_rms_norm_quantize(x, residual, w, 1e-5, *mode, options, keep_output)
                assert_same_bits(actual, [h, *norm.rms_norm_quantize(h, w, 1e-5, *mode, options, keep_output)])
            for w, b in ((None, None), (weight, None), (None, bias), (weight, bias)):
                actual = norm_add.add_layer_norm_quantize(x, residual, w, b, 1e-5, options, keep_output)
                assert_same_bits(actual, [h, *norm.layer_norm_quantize(h, w, b, 1e-5, options, keep_output)])


@gpu
@needs_cuda
@pytest.mark.parametrize("shape", [(303, 300), (2048, 4096), (5, 20000)])
def test_kernel_writes_every_element(shape):
    x, residual, weight, bias = operands(shape, torch.bfloat16, "cuda")
    run_poisoned(lambda: norm_add.add_rms_norm_quantize(x, residual, weight, 1e-5, True, False, OPTIONS, True))
    run_poisoned(lambda: norm_add.add_layer_norm_quantize(x, residual, weight, bias, 1e-5, OPTIONS, True))


@gpu
@needs_cuda
def test_an_infinite_sum_reaches_its_own_row_and_the_scale():
    x, residual, weight, _ = operands((64, 256), torch.bfloat16, "cuda")
    x[7, 3] = residual[7, 3] = torch.finfo(torch.bfloat16).max
    h, y, rstd, *buffers = norm_add.add_rms_norm_quantize(
        x, residual, weight, 1e-5, False, False, TensorForm(E4M3, True, False), True
    )
    assert h[7, 3] == torch.inf
    assert_same_bits(
        [y, rstd, *buffers], norm.rms_norm_quantize(h, weight, 1e-5, False, False, TensorForm(E4M3, True, False), True)
    )
