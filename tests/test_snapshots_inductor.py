"""The SwiGLU model through Inductor's passes on fake CUDA tensors, down to the kernels that a GPU would launch.

The texts of "lower.*" hold every argument of every launch, tile sizes too; here they are cut down to the kernels in order
and what each writes, so that a new tile choice is no new snapshot.
"""

from __future__ import annotations

import pytest
from expecttest import assert_expected_inline
from snapshot_models import SwigluMLP, capture_inference, capture_training, kernels_everywhere, launches

from te_dynamo.capture import Captured

SHAPE = (32, 64)


@pytest.fixture(scope="module")
def training() -> Captured:
    """The graphs of training."""
    with kernels_everywhere():
        return capture_training(SwigluMLP, SHAPE, "cuda", codegen="inductor")


@pytest.fixture(scope="module")
def inference() -> Captured:
    """The graphs of inference."""
    with kernels_everywhere():
        return capture_inference(SwigluMLP, SHAPE, "cuda", codegen="inductor")


def test_forward(training: Captured) -> None:
    """As with codegen="eager", by the same passes in Inductor's hooks."""
    assert_expected_inline(
        training["forward"],
        """\
norm.weight: bf16[64] = input
x: bf16[32, 64] = input
gate.weight: bf16[128, 64] = input
up.weight: bf16[128, 64] = input
down.weight: bf16[64, 128] = input
rms_norm_quantize: (f32[32], f8e4m3[32, 64], f8e4m3[64, 32], f32[1]) = te.rms_norm_quantize(x, norm.weight, 1e-05, cast_before_weight=False, zero_centered=False, quantizer=e4m3[row+column], keep_output=False)
quantize: (f8e4m3[128, 64], f8e4m3[64, 128], f32[1]) = te.quantize(gate.weight, e4m3[row+column])
gemm: bf16[32, 128] = te.gemm(rms_norm_quantize[1], rms_norm_quantize[3], quantize[0], quantize[2], None, bf16, fast_accum=True)
quantize_1: (f8e4m3[128, 64], f8e4m3[64, 128], f32[1]) = te.quantize(up.weight, e4m3[row+column])
gemm_1: bf16[32, 128] = te.gemm(rms_norm_quantize[1], rms_norm_quantize[3], quantize_1[0], quantize_1[2], None, bf16, fast_accum=True)
swiglu_quantize: (f8e4m3[32, 128], f8e4m3[128, 32], f32[1]) = te.swiglu_quantize(gemm, gemm_1, e4m3[row+column], keep_output=False)
quantize_2: (f8e4m3[64, 128], f8e4m3[128, 64], f32[1]) = te.quantize(down.weight, e4m3[row+column])
gemm_2: bf16[32, 64] = te.gemm(swiglu_quantize[0], swiglu_quantize[2], quantize_2[0], quantize_2[2], None, bf16, fast_accum=True)
reshape: f32[32, 1] = aten.reshape(rms_norm_quantize[0], [32, 1])
return gemm_2, norm.weight, x, rms_norm_quantize[2], rms_norm_quantize[3], quantize[1], quantize[2], gemm, quantize_1[1], quantize_1[2], gemm_1, swiglu_quantize[1], swiglu_quantize[2], quantize_2[1], quantize_2[2], reshape""",
    )


def test_backward(training: Captured) -> None:
    """As with codegen="eager"; the norm's gradient is left for Inductor to fuse with the sum before it."""
    assert_expected_inline(
        training["backward"],
        """\
norm.weight: bf16[64] = input
x: bf16[32, 64] = input
rms_norm_quantize[2]: f8e4m3[64, 32] = input
rms_norm_quantize[3]: f32[1] = input
quantize[1]: f8e4m3[64, 128] = input
quantize[2]: f32[1] = input
gemm: bf16[32, 128] = input
quantize_1[1]: f8e4m3[64, 128] = input
quantize_1[2]: f32[1] = input
gemm_1: bf16[32, 128] = input
swiglu_quantize[1]: f8e4m3[128, 32] = input
swiglu_quantize[2]: f32[1] = input
quantize_2[1]: f8e4m3[128, 64] = input
quantize_2[2]: f32[1] = input
reshape: f32[32, 1] = input
tangents_1: bf16[32, 64] = input
quantize_3: (f8e5m2[32, 64], f8e5m2[64, 32], f32[1]) = te.quantize(tangents_1, e5m2[row+column])
gemm_2: bf16[32, 128] = te.gemm(quantize_3[0], quantize_3[2], quantize_2[1], quantize_2[2], None, bf16, fast_accum=False)
gemm_3: bf16[64, 128] = te.gemm(quantize_3[1], quantize_3[2], swiglu_quantize[1], swiglu_quantize[2], None, bf16, fast_accum=False)
swiglu_backward_quantize: (f8e5m2[32, 128], f8e5m2[128, 32], f32[1], f8e5m2[32, 128], f8e5m2[128, 32], f32[1]) = te.swiglu_backward_quantize(gemm_2, gemm, gemm_1, e5m2[row+column], keep_output=False)
gemm_4: bf16[32, 64] = te.gemm(swiglu_backward_quantize[3], swiglu_backward_quantize[5], quantize_1[1], quantize_1[2], None, bf16, fast_accum=False)
gemm_5: bf16[128, 64] = te.gemm(swiglu_backward_quantize[4], swiglu_backward_quantize[5], rms_norm_quantize[2], rms_norm_quantize[3], None, bf16, fast_accum=False)
gemm_6: bf16[32, 64] = te.gemm(swiglu_backward_quantize[0], swiglu_backward_quantize[2], quantize[1], quantize[2], None, bf16, fast_accum=False)
gemm_7: bf16[128, 64] = te.gemm(swiglu_backward_quantize[1], swiglu_backward_quantize[2], rms_norm_quantize[2], rms_norm_quantize[3], None, bf16, fast_accum=False)
add: bf16[32, 64] = aten.add(gemm_4, gemm_6)
to: f32[32, 64] = add.to(f32)
to_1: f32[32, 64] = x.to(f32)
mul: f32[32, 64] = aten.mul(to_1, reshape)
to_2: f32[64] = norm.weight.to(f32)
mul_1: f32[32, 64] = aten.mul(to, to_2)
mul_2: f32[32, 64] = aten.mul(to, mul)
sum: f32[64] = aten.sum(mul_2, [0])
to_3: bf16[64] = sum.to(bf16)
mul_3: f32[32, 64] = aten.mul(mul_1, mul)
mean: f32[32, 1] = aten.mean(mul_3, [-1], keepdim=True)
mul_4: f32[32, 64] = aten.mul(mul, mean)
sub: f32[32, 64] = aten.sub(mul_1, mul_4)
mul_5: f32[32, 64] = aten.mul(reshape, sub)
to_4: bf16[32, 64] = mul_5.to(bf16)
return to_3, to_4, gemm_7, gemm_5, gemm_3""",
    )


def test_lower_forward(training: Captured) -> None:
    """Norm, SwiGLU and each weight in two launches, amax and then cast; one for each GEMM."""
    assert_expected_inline(
        launches(training["lower.forward"]),
        """\
norm_rows_kernel -> rstd, partials
norm_cast_kernel -> data, transpose, scale_inv
quantize_amax_kernel -> partials
quantize_cast_kernel -> data, transpose, scale_inv
gemm_kernel -> c
quantize_amax_kernel -> partials
quantize_cast_kernel -> data, transpose, scale_inv
gemm_kernel -> c
swiglu_amax_kernel -> partials
swiglu_write_kernel -> data, transpose, scale_inv
quantize_amax_kernel -> partials
quantize_cast_kernel -> data, transpose, scale_inv
gemm_kernel -> c""",
    )


def test_lower_backward(training: Captured) -> None:
    """dy is quantized, six GEMMs, and SwiGLU's two gradients in one pair of launches."""
    assert_expected_inline(
        launches(training["lower.backward"]),
        """\
quantize_amax_kernel -> partials
quantize_cast_kernel -> data, transpose, scale_inv
gemm_kernel -> c
gemm_kernel -> c
swiglu_backward_amax_kernel -> gate_partials, up_partials
swiglu_backward_write_kernel -> gate_data, gate_transpose, gate_scale_inv, up_data, up_transpose, up_scale_inv
gemm_kernel -> c
gemm_kernel -> c
gemm_kernel -> c
gemm_kernel -> c""",
    )


def test_lower_inference(inference: Captured) -> None:
    """No kernel writes a transpose."""
    assert_expected_inline(
        launches(inference["lower.inference"]),
        """\
norm_rows_kernel -> rstd, partials
norm_cast_kernel -> data, scale_inv
quantize_amax_kernel -> partials
quantize_cast_kernel -> data, scale_inv
quantize_amax_kernel -> partials
quantize_cast_kernel -> data, scale_inv
gemm_kernel -> c
gemm_kernel -> c
swiglu_amax_kernel -> partials
swiglu_write_kernel -> data, scale_inv
quantize_amax_kernel -> partials
quantize_cast_kernel -> data, scale_inv
gemm_kernel -> c""",
    )


def test_inference_is_the_forward_without_column_copies(inference: Captured) -> None:
    """Inductor moves the weights' quantizations together; each makes a row copy only."""
    assert_expected_inline(
        inference["inference"],
        """\
norm.weight: bf16[64] = input
x: bf16[32, 64] = input
gate.weight: bf16[128, 64] = input
up.weight: bf16[128, 64] = input
down.weight: bf16[64, 128] = input
rms_norm_quantize: (f32[32], f8e4m3[32, 64], f32[1]) = te.rms_norm_quantize(x, norm.weight, 1e-05, cast_before_weight=False, zero_centered=False, quantizer=e4m3[row], keep_output=False)
quantize: (f8e4m3[128, 64], f32[1]) = te.quantize(gate.weight, e4m3[row])
quantize_1: (f8e4m3[128, 64], f32[1]) = te.quantize(up.weight, e4m3[row])
gemm: bf16[32, 128] = te.gemm(rms_norm_quantize[1], rms_norm_quantize[2], quantize[0], quantize[1], None, bf16, fast_accum=True)
gemm_1: bf16[32, 128] = te.gemm(rms_norm_quantize[1], rms_norm_quantize[2], quantize_1[0], quantize_1[1], None, bf16, fast_accum=True)
swiglu_quantize: (f8e4m3[32, 128], f32[1]) = te.swiglu_quantize(gemm, gemm_1, e4m3[row], keep_output=False)
quantize_2: (f8e4m3[64, 128], f32[1]) = te.quantize(down.weight, e4m3[row])
gemm_2: bf16[32, 64] = te.gemm(swiglu_quantize[0], swiglu_quantize[1], quantize_2[0], quantize_2[1], None, bf16, fast_accum=True)
return gemm_2""",
    )
