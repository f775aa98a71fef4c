"""The SwiGLU model through Inductor's passes on fake CUDA tensors, down to the kernels that a GPU would launch.

The texts of "lower.*" hold every argument of every launch, tile sizes too; here they are cut down to the kernels in order
and what each writes, so that a new tile choice is no new snapshot.
"""

from __future__ import annotations

import pytest
from expecttest import assert_expected_inline
from helpers.models.snapshot_models import SwigluMLP, capture_inference, capture_training, kernels_everywhere, launches

from te_dynamo.inspect.graphs.capture import Captured

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
quantize_stacked: (f8e4m3[256, 64], f8e4m3[64, 256], f32[2]) = te.quantize_stacked([gate.weight, up.weight], e4m3[row+column], by_columns=False)
gemm_gated: (bf16[32, 256], f32[512]) = te.gemm_gated([rms_norm_quantize[1], rms_norm_quantize[3]], e4m3[row], [quantize_stacked[0], quantize_stacked[2]], e4m3[row], fast_accum=False, gate=0, kind='silu')
slice: bf16[32, 128] = aten.slice(gemm_gated[0], 1, 0, 128)
slice_1: bf16[32, 128] = aten.slice(gemm_gated[0], 1, 128, 256)
gated_quantize: (f8e4m3[32, 128], f8e4m3[128, 32], f32[1]) = te.gated_quantize(slice, slice_1, 'silu', e4m3[row+column], keep_output=False, amax=gemm_gated[1])
quantize: (f8e4m3[64, 128], f8e4m3[128, 64], f32[1]) = te.quantize(down.weight, e4m3[row+column])
gemm: bf16[32, 64] = te.gemm([gated_quantize[0], gated_quantize[2]], e4m3[row], [quantize[0], quantize[2]], e4m3[row], bf16, fast_accum=False)
reshape: f32[32, 1] = aten.reshape(rms_norm_quantize[0], [32, 1])
return gemm, norm.weight, x, rms_norm_quantize[2], rms_norm_quantize[3], quantize_stacked[1], quantize_stacked[2], slice, slice_1, gated_quantize[1], gated_quantize[2], quantize[1], quantize[2], reshape""",
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
quantize_stacked[1]: f8e4m3[64, 256] = input
quantize_stacked[2]: f32[2] = input
slice: bf16[32, 128] = input
slice_1: bf16[32, 128] = input
gated_quantize[1]: f8e4m3[128, 32] = input
gated_quantize[2]: f32[1] = input
quantize[1]: f8e4m3[128, 64] = input
quantize[2]: f32[1] = input
reshape: f32[32, 1] = input
tangents_1: bf16[32, 64] = input
quantize_1: (f8e5m2[32, 64], f8e5m2[64, 32], f32[1]) = te.quantize(tangents_1, e5m2[row+column])
gemm: bf16[32, 128] = te.gemm([quantize_1[0], quantize_1[2]], e5m2[row], [quantize[1], quantize[2]], e4m3[column], bf16, fast_accum=False)
gated_backward_quantize: (f8e5m2[32, 256], f32[2]) = te.gated_backward_quantize(gemm, slice, slice_1, 'silu', e5m2[row], keep_output=False, stacked=True)
gemm_1: bf16[32, 64] = te.gemm([gated_backward_quantize[0], gated_backward_quantize[1]], e5m2[row], [quantize_stacked[1], quantize_stacked[2]], e4m3[column], bf16, fast_accum=False, along='K', segments=[128, 128])
transpose: f8e5m2[256, 32] = te.transpose(gated_backward_quantize[0])
gemm_2: bf16[256, 64] = te.gemm([transpose, gated_backward_quantize[1]], e5m2[column], [rms_norm_quantize[2], rms_norm_quantize[3]], e4m3[column], bf16, fast_accum=False, along='M', segments=[128, 128])
slice_2: bf16[128, 64] = aten.slice(gemm_2, start=128, end=256)
slice_3: bf16[128, 64] = aten.slice(gemm_2, start=0, end=128)
to: f32[32, 64] = gemm_1.to(f32)
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
gemm_3: bf16[64, 128] = te.gemm([quantize_1[1], quantize_1[2]], e5m2[column], [gated_quantize[1], gated_quantize[2]], e4m3[column], bf16, fast_accum=False)
return to_3, to_4, slice_3, slice_2, gemm_3""",
    )


def test_lower_forward(training: Captured) -> None:
    """Norm, SwiGLU and each weight in two launches, amax and then cast; one for each GEMM."""
    assert_expected_inline(
        launches(training["lower.forward"]),
        """\
norm_rows_kernel -> rstd, partials
norm_cast_kernel -> data, transpose, scale_inv
quantize_amaxes_kernel -> partials
quantize_stacked_kernel -> data, transpose, scale_inv
gemm_kernel -> c
produce_amax_kernel -> partials
produce_write_kernel -> data, transpose, scale_inv
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
produce_amax_kernel -> partials, second_partials
gated_backward_rows_kernel -> dy, scale_inv
gemm_kernel -> c
transpose_kernel -> transpose
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
quantize_amaxes_kernel -> partials
quantize_stacked_kernel -> data, scale_inv
gemm_kernel -> c
produce_amax_kernel -> partials
produce_write_kernel -> data, scale_inv
quantize_few_kernel -> data, scale_inv
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
quantize_stacked: (f8e4m3[256, 64], f32[2]) = te.quantize_stacked([gate.weight, up.weight], e4m3[row], by_columns=False)
gemm_gated: (bf16[32, 256], f32[512]) = te.gemm_gated([rms_norm_quantize[1], rms_norm_quantize[2]], e4m3[row], [quantize_stacked[0], quantize_stacked[1]], e4m3[row], fast_accum=False, gate=0, kind='silu')
slice: bf16[32, 128] = aten.slice(gemm_gated[0], 1, 0, 128)
slice_1: bf16[32, 128] = aten.slice(gemm_gated[0], 1, 128, 256)
gated_quantize: (f8e4m3[32, 128], f32[1]) = te.gated_quantize(slice, slice_1, 'silu', e4m3[row], keep_output=False, amax=gemm_gated[1])
quantize: (f8e4m3[64, 128], f32[1]) = te.quantize(down.weight, e4m3[row])
gemm: bf16[32, 64] = te.gemm([gated_quantize[0], gated_quantize[1]], e4m3[row], [quantize[0], quantize[1]], e4m3[row], bf16, fast_accum=False)
return gemm""",
    )
