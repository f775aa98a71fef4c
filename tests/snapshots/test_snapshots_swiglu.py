"""Every stage of RMSNorm, gate and up, silu(gate) * up, down."""

from __future__ import annotations

import pytest
from expecttest import assert_expected_inline
from helpers.models.snapshot_models import SwigluMLP, snapshot

SHAPE = (32, 64)


@pytest.fixture(scope="module")
def graphs() -> dict[str, str]:
    """{stage: text}, taken on the CPU; the rewritten graphs run as they are."""
    return snapshot(SwigluMLP, SHAPE, "cpu")


def test_match(graphs: dict[str, str]) -> None:
    """silu and the product became one te.gated; gate and up read the same norm."""
    assert_expected_inline(
        graphs["match"],
        """\
norm.weight: bf16[64] = input
x: bf16[32, 64] = input
gate.weight: bf16[128, 64] = input
up.weight: bf16[128, 64] = input
down.weight: bf16[64, 128] = input
rms_norm: (bf16[32, 64], f32[32]) = te.rms_norm(x, norm.weight, 1e-05, cast_before_weight=False, zero_centered=False)
linear: (bf16[32, 128], f8e4m3[64, 32], f32[1], f8e4m3[64, 128], f32[1]) = te.linear(rms_norm[0], gate.weight, None, linear(x e4m3[row+column], w e4m3[row+column], dy e5m2[row+column]))
linear_1: (bf16[32, 128], f8e4m3[64, 32], f32[1], f8e4m3[64, 128], f32[1]) = te.linear(rms_norm[0], up.weight, None, linear(x e4m3[row+column], w e4m3[row+column], dy e5m2[row+column]))
gated: bf16[32, 128] = te.gated(linear[0], linear_1[0], 'silu')
linear_2: (bf16[32, 64], f8e4m3[128, 32], f32[1], f8e4m3[128, 64], f32[1]) = te.linear(gated, down.weight, None, linear(x e4m3[row+column], w e4m3[row+column], dy e5m2[row+column]))
return linear_2[0]""",
    )


def test_joint(graphs: dict[str, str]) -> None:
    """One te.quantize serves gate and up, in forward and again in both weight gradients."""
    assert_expected_inline(
        graphs["joint"],
        """\
norm.weight: bf16[64] = input
x: bf16[32, 64] = input
gate.weight: bf16[128, 64] = input
up.weight: bf16[128, 64] = input
down.weight: bf16[64, 128] = input
tangents_1: bf16[32, 64] = input
rms_norm: (bf16[32, 64], f32[32]) = te.rms_norm(x, norm.weight, 1e-05, cast_before_weight=False, zero_centered=False)
quantize: (f8e4m3[32, 64], f8e4m3[64, 32], f32[1]) = te.quantize(rms_norm[0], e4m3[row+column])
quantize_stacked: (f8e4m3[256, 64], f8e4m3[64, 256], f32[2]) = te.quantize_stacked([gate.weight, up.weight], e4m3[row+column], by_columns=False)
gemm: bf16[32, 256] = te.gemm([quantize[0], quantize[2]], e4m3[row], [quantize_stacked[0], quantize_stacked[2]], e4m3[row], bf16, fast_accum=False, along='N', segments=[128, 128])
slice: bf16[32, 128] = aten.slice(gemm, 1, 0, 128)
slice_1: bf16[32, 128] = aten.slice(gemm, 1, 128, 256)
gated: bf16[32, 128] = te.gated(slice, slice_1, 'silu')
quantize_1: (f8e4m3[32, 128], f8e4m3[128, 32], f32[1]) = te.quantize(gated, e4m3[row+column])
quantize_2: (f8e4m3[64, 128], f8e4m3[128, 64], f32[1]) = te.quantize(down.weight, e4m3[row+column])
gemm_1: bf16[32, 64] = te.gemm([quantize_1[0], quantize_1[2]], e4m3[row], [quantize_2[0], quantize_2[2]], e4m3[row], bf16, fast_accum=False)
quantize_3: (f8e5m2[32, 64], f8e5m2[64, 32], f32[1]) = te.quantize(tangents_1, e5m2[row+column])
gemm_2: bf16[32, 128] = te.gemm([quantize_3[0], quantize_3[2]], e5m2[row], [quantize_2[1], quantize_2[2]], e4m3[column], bf16, fast_accum=False)
gemm_3: bf16[64, 128] = te.gemm([quantize_3[1], quantize_3[2]], e5m2[column], [quantize_1[1], quantize_1[2]], e4m3[column], bf16, fast_accum=False)
gated_backward: (bf16[32, 128], bf16[32, 128]) = te.gated_backward(gemm_2, slice, slice_1, 'silu')
quantize_stacked_1: (f8e5m2[32, 256], f8e5m2[256, 32], f32[2]) = te.quantize_stacked([gated_backward[0], gated_backward[1]], e5m2[row+column], by_columns=True)
gemm_4: bf16[32, 64] = te.gemm([quantize_stacked_1[0], quantize_stacked_1[2]], e5m2[row], [quantize_stacked[1], quantize_stacked[2]], e4m3[column], bf16, fast_accum=False, along='K', segments=[128, 128])
gemm_5: bf16[256, 64] = te.gemm([quantize_stacked_1[1], quantize_stacked_1[2]], e5m2[column], [quantize[1], quantize[2]], e4m3[column], bf16, fast_accum=False, along='M', segments=[128, 128])
slice_2: bf16[128, 64] = aten.slice(gemm_5, start=128, end=256)
slice_3: bf16[128, 64] = aten.slice(gemm_5, start=0, end=128)
to: f32[32, 64] = gemm_4.to(f32)
view: f32[32, 1] = aten.view(rms_norm[1], [32, 1])
to_1: f32[32, 64] = x.to(f32)
mul: f32[32, 64] = aten.mul(to_1, view)
to_2: f32[64] = norm.weight.to(f32)
mul_1: f32[32, 64] = aten.mul(to, to_2)
mul_2: f32[32, 64] = aten.mul(to, mul)
sum: f32[64] = aten.sum(mul_2, [0])
to_3: bf16[64] = sum.to(bf16)
mul_3: f32[32, 64] = aten.mul(mul_1, mul)
mean: f32[32, 1] = aten.mean(mul_3, [-1], keepdim=True)
mul_4: f32[32, 64] = aten.mul(mul, mean)
sub: f32[32, 64] = aten.sub(mul_1, mul_4)
mul_5: f32[32, 64] = aten.mul(view, sub)
to_4: bf16[32, 64] = mul_5.to(bf16)
return gemm_1, to_3, to_4, slice_3, slice_2, gemm_3""",
    )


def test_forward(graphs: dict[str, str]) -> None:
    """The norm and SwiGLU write FP8 themselves: their bf16 results exist nowhere."""
    assert_expected_inline(
        graphs["forward"],
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
view: f32[32, 1] = aten.view(rms_norm_quantize[0], [32, 1])
return gemm, norm.weight, x, rms_norm_quantize[2], rms_norm_quantize[3], quantize_stacked[1], quantize_stacked[2], slice, slice_1, gated_quantize[1], gated_quantize[2], quantize[1], quantize[2], view""",
    )


def test_backward(graphs: dict[str, str]) -> None:
    """One te.gated_backward_quantize gives both gradients in FP8, and four GEMMs read it."""
    assert_expected_inline(
        graphs["backward"],
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
view: f32[32, 1] = input
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
mul: f32[32, 64] = aten.mul(to_1, view)
to_2: f32[64] = norm.weight.to(f32)
mul_1: f32[32, 64] = aten.mul(to, to_2)
mul_2: f32[32, 64] = aten.mul(to, mul)
sum: f32[64] = aten.sum(mul_2, [0])
to_3: bf16[64] = sum.to(bf16)
mul_3: f32[32, 64] = aten.mul(mul_1, mul)
mean: f32[32, 1] = aten.mean(mul_3, [-1], keepdim=True)
mul_4: f32[32, 64] = aten.mul(mul, mean)
sub: f32[32, 64] = aten.sub(mul_1, mul_4)
mul_5: f32[32, 64] = aten.mul(view, sub)
to_4: bf16[32, 64] = mul_5.to(bf16)
gemm_3: bf16[64, 128] = te.gemm([quantize_1[1], quantize_1[2]], e5m2[column], [gated_quantize[1], gated_quantize[2]], e4m3[column], bf16, fast_accum=False)
return to_3, to_4, slice_3, slice_2, gemm_3""",
    )


def test_inference(graphs: dict[str, str]) -> None:
    """Row copies only."""
    assert_expected_inline(
        graphs["inference"],
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


def test_fake_cuda_gives_the_same_graphs(graphs: dict[str, str]) -> None:
    """What is above is also what a GPU gets: nothing but lowering asks for the device."""
    assert snapshot(SwigluMLP, SHAPE, "cuda") == graphs
