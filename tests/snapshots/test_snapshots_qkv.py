"""Every stage of q, k and v that share an RMSNorm, with a batch dimension."""

from __future__ import annotations

import pytest
from expecttest import assert_expected_inline
from helpers.models.snapshot_models import SharedNorm, snapshot

SHAPE = (2, 16, 64)


@pytest.fixture(scope="module")
def graphs() -> dict[str, str]:
    """{stage: text}, taken on the CPU; the rewritten graphs run as they are."""
    return snapshot(SharedNorm, SHAPE, "cpu")


def test_match(graphs: dict[str, str]) -> None:
    """Three te.linear read one te.rms_norm."""
    assert_expected_inline(
        graphs["match"],
        """\
norm.weight: bf16[64] = input
x: bf16[2, 16, 64] = input
q.weight: bf16[64, 64] = input
k.weight: bf16[64, 64] = input
v.weight: bf16[64, 64] = input
rms_norm: (bf16[2, 16, 64], f32[32]) = te.rms_norm(x, norm.weight, 1e-05, cast_before_weight=False, zero_centered=False)
linear: (bf16[2, 16, 64], f8e4m3[64, 32], f32[1], f8e4m3[64, 64], f32[1]) = te.linear(rms_norm[0], q.weight, None, linear(x e4m3[row+column], w e4m3[row+column], dy e5m2[row+column]))
linear_1: (bf16[2, 16, 64], f8e4m3[64, 32], f32[1], f8e4m3[64, 64], f32[1]) = te.linear(rms_norm[0], k.weight, None, linear(x e4m3[row+column], w e4m3[row+column], dy e5m2[row+column]))
linear_2: (bf16[2, 16, 64], f8e4m3[64, 32], f32[1], f8e4m3[64, 64], f32[1]) = te.linear(rms_norm[0], v.weight, None, linear(x e4m3[row+column], w e4m3[row+column], dy e5m2[row+column]))
return linear[0], linear_1[0], linear_2[0]""",
    )


def test_joint(graphs: dict[str, str]) -> None:
    """One te.quantize serves q, k and v, and all three weight gradients; only the views of the results know the batch dimension."""
    assert_expected_inline(
        graphs["joint"],
        """\
norm.weight: bf16[64] = input
x: bf16[2, 16, 64] = input
q.weight: bf16[64, 64] = input
k.weight: bf16[64, 64] = input
v.weight: bf16[64, 64] = input
tangents_1: bf16[2, 16, 64] = input
tangents_2: bf16[2, 16, 64] = input
tangents_3: bf16[2, 16, 64] = input
rms_norm: (bf16[2, 16, 64], f32[32]) = te.rms_norm(x, norm.weight, 1e-05, cast_before_weight=False, zero_centered=False)
quantize: (f8e4m3[32, 64], f8e4m3[64, 32], f32[1]) = te.quantize(rms_norm[0], e4m3[row+column])
quantize_1: (f8e4m3[64, 64], f8e4m3[64, 64], f32[1]) = te.quantize(q.weight, e4m3[row+column])
gemm: bf16[32, 64] = te.gemm([quantize[0], quantize[2]], e4m3[row], [quantize_1[0], quantize_1[2]], e4m3[row], bf16, fast_accum=False)
view: bf16[2, 16, 64] = aten.view(gemm, [2, 16, 64])
quantize_2: (f8e4m3[64, 64], f8e4m3[64, 64], f32[1]) = te.quantize(k.weight, e4m3[row+column])
gemm_1: bf16[32, 64] = te.gemm([quantize[0], quantize[2]], e4m3[row], [quantize_2[0], quantize_2[2]], e4m3[row], bf16, fast_accum=False)
view_1: bf16[2, 16, 64] = aten.view(gemm_1, [2, 16, 64])
quantize_3: (f8e4m3[64, 64], f8e4m3[64, 64], f32[1]) = te.quantize(v.weight, e4m3[row+column])
gemm_2: bf16[32, 64] = te.gemm([quantize[0], quantize[2]], e4m3[row], [quantize_3[0], quantize_3[2]], e4m3[row], bf16, fast_accum=False)
view_2: bf16[2, 16, 64] = aten.view(gemm_2, [2, 16, 64])
quantize_4: (f8e5m2[32, 64], f8e5m2[64, 32], f32[1]) = te.quantize(tangents_3, e5m2[row+column])
gemm_3: bf16[32, 64] = te.gemm([quantize_4[0], quantize_4[2]], e5m2[row], [quantize_3[1], quantize_3[2]], e4m3[column], bf16, fast_accum=False)
gemm_4: bf16[64, 64] = te.gemm([quantize_4[1], quantize_4[2]], e5m2[column], [quantize[1], quantize[2]], e4m3[column], bf16, fast_accum=False)
view_3: bf16[2, 16, 64] = aten.view(gemm_3, [2, 16, 64])
quantize_5: (f8e5m2[32, 64], f8e5m2[64, 32], f32[1]) = te.quantize(tangents_2, e5m2[row+column])
gemm_5: bf16[32, 64] = te.gemm([quantize_5[0], quantize_5[2]], e5m2[row], [quantize_2[1], quantize_2[2]], e4m3[column], bf16, fast_accum=False)
gemm_6: bf16[64, 64] = te.gemm([quantize_5[1], quantize_5[2]], e5m2[column], [quantize[1], quantize[2]], e4m3[column], bf16, fast_accum=False)
view_4: bf16[2, 16, 64] = aten.view(gemm_5, [2, 16, 64])
add: bf16[2, 16, 64] = aten.add(view_3, view_4)
quantize_6: (f8e5m2[32, 64], f8e5m2[64, 32], f32[1]) = te.quantize(tangents_1, e5m2[row+column])
gemm_7: bf16[32, 64] = te.gemm([quantize_6[0], quantize_6[2]], e5m2[row], [quantize_1[1], quantize_1[2]], e4m3[column], bf16, fast_accum=False)
gemm_8: bf16[64, 64] = te.gemm([quantize_6[1], quantize_6[2]], e5m2[column], [quantize[1], quantize[2]], e4m3[column], bf16, fast_accum=False)
view_5: bf16[2, 16, 64] = aten.view(gemm_7, [2, 16, 64])
add_1: bf16[2, 16, 64] = aten.add(add, view_5)
to: f32[2, 16, 64] = add_1.to(f32)
view_6: f32[2, 16, 1] = aten.view(rms_norm[1], [2, 16, 1])
to_1: f32[2, 16, 64] = x.to(f32)
mul: f32[2, 16, 64] = aten.mul(to_1, view_6)
to_2: f32[64] = norm.weight.to(f32)
mul_1: f32[2, 16, 64] = aten.mul(to, to_2)
mul_2: f32[2, 16, 64] = aten.mul(to, mul)
sum: f32[64] = aten.sum(mul_2, [0, 1])
to_3: bf16[64] = sum.to(bf16)
mul_3: f32[2, 16, 64] = aten.mul(mul_1, mul)
mean: f32[2, 16, 1] = aten.mean(mul_3, [-1], keepdim=True)
mul_4: f32[2, 16, 64] = aten.mul(mul, mean)
sub: f32[2, 16, 64] = aten.sub(mul_1, mul_4)
mul_5: f32[2, 16, 64] = aten.mul(view_6, sub)
to_4: bf16[2, 16, 64] = mul_5.to(bf16)
return view, view_1, view_2, to_3, to_4, gemm_8, gemm_6, gemm_4""",
    )


def test_forward(graphs: dict[str, str]) -> None:
    """The norm writes FP8 itself, once, for three GEMMs; one column copy of it is saved, not three."""
    assert_expected_inline(
        graphs["forward"],
        """\
norm.weight: bf16[64] = input
x: bf16[2, 16, 64] = input
q.weight: bf16[64, 64] = input
k.weight: bf16[64, 64] = input
v.weight: bf16[64, 64] = input
rms_norm_quantize: (f32[32], f8e4m3[32, 64], f8e4m3[64, 32], f32[1]) = te.rms_norm_quantize(x, norm.weight, 1e-05, cast_before_weight=False, zero_centered=False, quantizer=e4m3[row+column], keep_output=False)
quantize: (f8e4m3[64, 64], f8e4m3[64, 64], f32[1]) = te.quantize(q.weight, e4m3[row+column])
gemm: bf16[32, 64] = te.gemm([rms_norm_quantize[1], rms_norm_quantize[3]], e4m3[row], [quantize[0], quantize[2]], e4m3[row], bf16, fast_accum=False)
view: bf16[2, 16, 64] = aten.view(gemm, [2, 16, 64])
quantize_1: (f8e4m3[64, 64], f8e4m3[64, 64], f32[1]) = te.quantize(k.weight, e4m3[row+column])
gemm_1: bf16[32, 64] = te.gemm([rms_norm_quantize[1], rms_norm_quantize[3]], e4m3[row], [quantize_1[0], quantize_1[2]], e4m3[row], bf16, fast_accum=False)
view_1: bf16[2, 16, 64] = aten.view(gemm_1, [2, 16, 64])
quantize_2: (f8e4m3[64, 64], f8e4m3[64, 64], f32[1]) = te.quantize(v.weight, e4m3[row+column])
gemm_2: bf16[32, 64] = te.gemm([rms_norm_quantize[1], rms_norm_quantize[3]], e4m3[row], [quantize_2[0], quantize_2[2]], e4m3[row], bf16, fast_accum=False)
view_2: bf16[2, 16, 64] = aten.view(gemm_2, [2, 16, 64])
view_3: f32[2, 16, 1] = aten.view(rms_norm_quantize[0], [2, 16, 1])
return view, view_1, view_2, norm.weight, x, rms_norm_quantize[2], rms_norm_quantize[3], quantize[1], quantize[2], quantize_1[1], quantize_1[2], quantize_2[1], quantize_2[2], view_3""",
    )


def test_backward(graphs: dict[str, str]) -> None:
    """Three gradients are quantized, each once for two GEMMs; nothing is quantized again that forward has."""
    assert_expected_inline(
        graphs["backward"],
        """\
norm.weight: bf16[64] = input
x: bf16[2, 16, 64] = input
rms_norm_quantize[2]: f8e4m3[64, 32] = input
rms_norm_quantize[3]: f32[1] = input
quantize[1]: f8e4m3[64, 64] = input
quantize[2]: f32[1] = input
quantize_1[1]: f8e4m3[64, 64] = input
quantize_1[2]: f32[1] = input
quantize_2[1]: f8e4m3[64, 64] = input
quantize_2[2]: f32[1] = input
view_3: f32[2, 16, 1] = input
tangents_1: bf16[2, 16, 64] = input
tangents_2: bf16[2, 16, 64] = input
tangents_3: bf16[2, 16, 64] = input
quantize_3: (f8e5m2[32, 64], f8e5m2[64, 32], f32[1]) = te.quantize(tangents_3, e5m2[row+column])
gemm: bf16[32, 64] = te.gemm([quantize_3[0], quantize_3[2]], e5m2[row], [quantize_2[1], quantize_2[2]], e4m3[column], bf16, fast_accum=False)
view: bf16[2, 16, 64] = aten.view(gemm, [2, 16, 64])
quantize_4: (f8e5m2[32, 64], f8e5m2[64, 32], f32[1]) = te.quantize(tangents_2, e5m2[row+column])
gemm_1: bf16[32, 64] = te.gemm([quantize_4[0], quantize_4[2]], e5m2[row], [quantize_1[1], quantize_1[2]], e4m3[column], bf16, fast_accum=False)
view_1: bf16[2, 16, 64] = aten.view(gemm_1, [2, 16, 64])
add: bf16[2, 16, 64] = aten.add(view, view_1)
quantize_5: (f8e5m2[32, 64], f8e5m2[64, 32], f32[1]) = te.quantize(tangents_1, e5m2[row+column])
gemm_2: bf16[32, 64] = te.gemm([quantize_5[0], quantize_5[2]], e5m2[row], [quantize[1], quantize[2]], e4m3[column], bf16, fast_accum=False)
gemm_3: bf16[64, 64] = te.gemm([quantize_5[1], quantize_5[2]], e5m2[column], [rms_norm_quantize[2], rms_norm_quantize[3]], e4m3[column], bf16, fast_accum=False)
view_2: bf16[2, 16, 64] = aten.view(gemm_2, [2, 16, 64])
add_1: bf16[2, 16, 64] = aten.add(add, view_2)
to: f32[2, 16, 64] = add_1.to(f32)
to_1: f32[2, 16, 64] = x.to(f32)
mul: f32[2, 16, 64] = aten.mul(to_1, view_3)
to_2: f32[64] = norm.weight.to(f32)
mul_1: f32[2, 16, 64] = aten.mul(to, to_2)
mul_2: f32[2, 16, 64] = aten.mul(to, mul)
sum: f32[64] = aten.sum(mul_2, [0, 1])
to_3: bf16[64] = sum.to(bf16)
mul_3: f32[2, 16, 64] = aten.mul(mul_1, mul)
mean: f32[2, 16, 1] = aten.mean(mul_3, [-1], keepdim=True)
mul_4: f32[2, 16, 64] = aten.mul(mul, mean)
sub: f32[2, 16, 64] = aten.sub(mul_1, mul_4)
mul_5: f32[2, 16, 64] = aten.mul(view_3, sub)
to_4: bf16[2, 16, 64] = mul_5.to(bf16)
gemm_4: bf16[64, 64] = te.gemm([quantize_4[1], quantize_4[2]], e5m2[column], [rms_norm_quantize[2], rms_norm_quantize[3]], e4m3[column], bf16, fast_accum=False)
gemm_5: bf16[64, 64] = te.gemm([quantize_3[1], quantize_3[2]], e5m2[column], [rms_norm_quantize[2], rms_norm_quantize[3]], e4m3[column], bf16, fast_accum=False)
return to_3, to_4, gemm_3, gemm_4, gemm_5""",
    )


def test_inference(graphs: dict[str, str]) -> None:
    """One norm kernel, three weights, three GEMMs."""
    assert_expected_inline(
        graphs["inference"],
        """\
norm.weight: bf16[64] = input
x: bf16[2, 16, 64] = input
q.weight: bf16[64, 64] = input
k.weight: bf16[64, 64] = input
v.weight: bf16[64, 64] = input
rms_norm_quantize: (f32[32], f8e4m3[32, 64], f32[1]) = te.rms_norm_quantize(x, norm.weight, 1e-05, cast_before_weight=False, zero_centered=False, quantizer=e4m3[row], keep_output=False)
quantize: (f8e4m3[64, 64], f32[1]) = te.quantize(q.weight, e4m3[row])
gemm: bf16[32, 64] = te.gemm([rms_norm_quantize[1], rms_norm_quantize[2]], e4m3[row], [quantize[0], quantize[1]], e4m3[row], bf16, fast_accum=False)
view: bf16[2, 16, 64] = aten.view(gemm, [2, 16, 64])
quantize_1: (f8e4m3[64, 64], f32[1]) = te.quantize(k.weight, e4m3[row])
gemm_1: bf16[32, 64] = te.gemm([rms_norm_quantize[1], rms_norm_quantize[2]], e4m3[row], [quantize_1[0], quantize_1[1]], e4m3[row], bf16, fast_accum=False)
view_1: bf16[2, 16, 64] = aten.view(gemm_1, [2, 16, 64])
quantize_2: (f8e4m3[64, 64], f32[1]) = te.quantize(v.weight, e4m3[row])
gemm_2: bf16[32, 64] = te.gemm([rms_norm_quantize[1], rms_norm_quantize[2]], e4m3[row], [quantize_2[0], quantize_2[1]], e4m3[row], bf16, fast_accum=False)
view_2: bf16[2, 16, 64] = aten.view(gemm_2, [2, 16, 64])
return view, view_1, view_2""",
    )


def test_fake_cuda_gives_the_same_graphs(graphs: dict[str, str]) -> None:
    """What is above is also what a GPU gets: nothing but lowering asks for the device."""
    assert snapshot(SharedNorm, SHAPE, "cuda") == graphs
