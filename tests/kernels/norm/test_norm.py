"""RMSNorm and LayerNorm, alone and fused with quantization."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from helpers.kernels.kernel_cases import (
    DTYPES,
    RAGGED_SHAPES,
    assert_same_bits,
    assert_within_rounding,
    gpu,
    make_input,
    needs_cuda,
    run_poisoned,
)

from te_dynamo.kernels.layouts.tensor import TensorForm
from te_dynamo.kernels.norm import kernels, norm
from te_dynamo.kernels.quantize.current import quantize, quantize_reference

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
RMS_MODES = ((False, False), (True, False), (False, True))  # cast_before_weight, zero_centered


def exact_rms_norm(x, weight, eps):
    value = x.double()
    y = value * torch.rsqrt(value.square().mean(-1, keepdim=True) + eps)
    return y if weight is None else y * weight.double()


def exact_layer_norm(x, weight, bias, eps):
    parameters = (None if p is None else p.double() for p in (weight, bias))
    return F.layer_norm(x.double(), x.shape[-1:], *parameters, eps)


def parameters(columns, dtype, device="cpu"):
    weight = make_input("normal", (columns,), dtype, device, seed=1)
    return weight, make_input("normal", (columns,), dtype, device, seed=2)


# --- reference ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_reference_is_torch_rms_norm(dtype):
    x = make_input("normal", (3, 7, 96), dtype)
    weight, _ = parameters(96, dtype)
    y, rstd = norm.rms_norm_reference(x, weight, 1e-5, False, False)
    torch.testing.assert_close(y, F.rms_norm(x, (96,), weight, 1e-5))
    assert_within_rounding(y, exact_rms_norm(x, weight, 1e-5))
    assert rstd.shape == (21,) and rstd.dtype == torch.float32
    torch.testing.assert_close(rstd, torch.rsqrt(x.float().square().mean(-1) + 1e-5).reshape(-1))
    assert_within_rounding(norm.rms_norm_reference(x, None, 1e-5, False, False)[0], exact_rms_norm(x, None, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
def test_reference_is_hugging_face_llama(dtype):
    x = make_input("normal", (5, 64), dtype)
    weight, _ = parameters(64, dtype)
    hidden = x.to(torch.float32)
    hidden = hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + 1e-6)
    assert_same_bits([norm.rms_norm_reference(x, weight, 1e-6, True, False)[0]], [weight * hidden.to(dtype)])


@pytest.mark.parametrize("dtype", DTYPES)
def test_reference_is_hugging_face_gemma(dtype):
    x = make_input("normal", (5, 64), dtype)
    weight, _ = parameters(64, dtype)
    hidden = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
    expected = (hidden * (1.0 + weight.float())).type_as(x)
    assert_same_bits([norm.rms_norm_reference(x, weight, 1e-6, False, True)[0]], [expected])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("affine", ["none", "weight", "bias", "both"])
def test_reference_is_torch_layer_norm(dtype, affine):
    x = make_input("normal", (3, 7, 96), dtype) + 3
    weight, bias = parameters(96, dtype)
    weight = weight if affine in ("weight", "both") else None
    bias = bias if affine in ("bias", "both") else None
    y, mean, rstd = norm.layer_norm_reference(x, weight, bias, 1e-5)
    torch.testing.assert_close(y, F.layer_norm(x, (96,), weight, bias, 1e-5))
    assert_within_rounding(y, exact_layer_norm(x, weight, bias, 1e-5), atol=1e-5)
    torch.testing.assert_close(mean, x.float().mean(-1).reshape(-1))
    torch.testing.assert_close(rstd, torch.rsqrt(x.float().var(-1, correction=0) + 1e-5).reshape(-1))


def test_weight_may_be_wider_than_x():
    x = make_input("normal", (4, 64), torch.bfloat16)
    weight, bias = parameters(64, torch.float32)
    y, _ = norm.rms_norm_reference(x, weight, 1e-5, False, False)
    assert y.dtype == torch.bfloat16
    assert_within_rounding(y, exact_rms_norm(x, weight, 1e-5))
    y, *_ = norm.layer_norm_reference(x, weight, bias, 1e-5)
    assert_within_rounding(y, exact_layer_norm(x, weight, bias, 1e-5), atol=1e-5)


@pytest.mark.parametrize("keep_output", [False, True])
def test_fused_reference_is_norm_then_quantize(keep_output):
    x = make_input("normal", (2, 9, 64), torch.bfloat16)
    weight, bias = parameters(64, torch.bfloat16)
    options = TensorForm(E4M3, True, True, False, 0.0)
    y, rstd = norm.rms_norm_reference(x, weight, 1e-5, True, False)
    actual = norm.rms_norm_quantize_reference(x, weight, 1e-5, True, False, options, keep_output)
    assert_same_bits(actual, [*([y] if keep_output else []), rstd, *quantize_reference(y, options)])
    y, mean, rstd = norm.layer_norm_reference(x, weight, bias, 1e-5)
    actual = norm.layer_norm_quantize_reference(x, weight, bias, 1e-5, options, keep_output)
    assert_same_bits(actual, [*([y] if keep_output else []), mean, rstd, *quantize_reference(y, options)])


@pytest.mark.parametrize(
    "columns, itemsize, layer, expected",
    [
        (32, 2, False, (32, 1)),
        (4096, 2, False, (4096, 4)),
        (5000, 4, False, (8192, 8)),
        (16384, 2, False, (16384, 16)),
        (16384, 4, False, (8192, 8)),
        (4096, 2, True, (4096, 8)),
        (16384, 2, True, (16384, 16)),
    ],
)
def test_row_block(columns, itemsize, layer, expected):
    assert kernels.row_block(columns, itemsize, layer) == expected


# --- kernels ------------------------------------------------------------------------------------------------


@gpu
@needs_cuda
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [*RAGGED_SHAPES, (33, 16384), (9, 20000)])
def test_kernel_is_exact_to_rounding(shape, dtype):
    x = make_input("normal", shape, dtype, "cuda")
    for parameter_dtype in (dtype, torch.float32):
        weight, bias = parameters(shape[-1], parameter_dtype, "cuda")
        y, rstd = norm.rms_norm(x, weight, 1e-5, False, False)
        assert_within_rounding(y, exact_rms_norm(x, weight, 1e-5))
        y, _ = norm.rms_norm(x, weight, 1e-5, False, True)
        assert_within_rounding(y, exact_rms_norm(x, 1 + weight.double(), 1e-5), atol=1e-5)
        y, _ = norm.rms_norm(x, weight, 1e-5, True, False)
        assert_within_rounding(y, exact_rms_norm(x, weight, 1e-5), ulps=2)
        torch.testing.assert_close(rstd, norm.rms_norm_reference(x, None, 1e-5, False, False)[1])
        y, mean, rstd = norm.layer_norm(x, weight, bias, 1e-5)
        assert_within_rounding(y, exact_layer_norm(x, weight, bias, 1e-5), atol=2e-5)
        torch.testing.assert_close((mean, rstd), norm.layer_norm_reference(x, None, None, 1e-5)[1:])


@gpu
@needs_cuda
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [*RAGGED_SHAPES, (33, 16384), (9, 20000)])
def test_fused_kernel_equals_norm_then_quantize(shape, dtype):
    x = make_input("normal", shape, dtype, "cuda")
    for parameter_dtype in {dtype, torch.float32}:
        weight, bias = parameters(shape[-1], parameter_dtype, "cuda")
        for options in (
            TensorForm(E4M3, True, True, False, 0.0),
            TensorForm(E5M2, False, True, True, 0.0),
            TensorForm(E4M3, True, False, False, 1.0),
        ):
            for w, (cast, zero) in ((None, RMS_MODES[1]), *((weight, mode) for mode in RMS_MODES)):
                y, rstd = norm.rms_norm(x, w, 1e-5, cast, zero)
                fused = norm.rms_norm_quantize(x, w, 1e-5, cast, zero, options, True)
                assert_same_bits(fused, [y, rstd, *quantize(y, options)])
                assert_same_bits(norm.rms_norm_quantize(x, w, 1e-5, cast, zero, options, False), fused[1:])
            for w, b in ((None, None), (weight, None), (None, bias), (weight, bias)):
                y, mean, rstd = norm.layer_norm(x, w, b, 1e-5)
                fused = norm.layer_norm_quantize(x, w, b, 1e-5, options, True)
                assert_same_bits(fused, [y, mean, rstd, *quantize(y, options)])
                assert_same_bits(norm.layer_norm_quantize(x, w, b, 1e-5, options, False), fused[1:])


@gpu
@needs_cuda
@pytest.mark.parametrize("shape", [(303, 300), (2048, 4096)])
def test_kernels_write_every_element(shape):
    x = make_input("normal", shape, torch.bfloat16, "cuda")
    weight, bias = parameters(shape[-1], torch.bfloat16, "cuda")
    options = (TensorForm(E4M3, True, True), True)
    run_poisoned(lambda: norm.rms_norm(x, weight, 1e-5, True, False))
    run_poisoned(lambda: norm.layer_norm(x, weight, bias, 1e-5))
    run_poisoned(lambda: norm.rms_norm_quantize(x, weight, 1e-5, True, False, *options))
    run_poisoned(lambda: norm.layer_norm_quantize(x, weight, bias, 1e-5, *options))


@gpu
@needs_cuda
def test_a_nan_row_reaches_only_its_own_row_and_the_scale():
    x = make_input("nan", (64, 256), torch.bfloat16, "cuda")
    y, rstd, data, scale_inv = norm.rms_norm_quantize(x, None, 1e-5, False, False, TensorForm(E4M3, True, False), True)
    bad = x.isnan().any(-1)
    assert torch.equal(y.isnan().any(-1), bad) and torch.equal(rstd.isnan(), bad)
    assert torch.equal(data.float().isnan().all(-1), bad) and scale_inv.item() == 1
