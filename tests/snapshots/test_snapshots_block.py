"""Every stage of a transformer block. Attention is torch's own: te_dynamo ends at q, k, v and begins again at o."""

from __future__ import annotations

import pytest
from expecttest import assert_expected_inline
from helpers.models.snapshot_models import Block, snapshot
from torch.nn.attention import SDPBackend, sdpa_kernel

SHAPE = (2, 8, 64)


@pytest.fixture(scope="module")
def graphs() -> dict[str, str]:
    """{stage: text}, taken on the CPU; the rewritten graphs run as they are."""
    return snapshot(Block, SHAPE, "cpu")


def test_match(graphs: dict[str, str]) -> None:
    """Both norms, all seven linears and SwiGLU are te operations; attention and residuals are what the user wrote."""
    assert_expected_inline(
        graphs["match"],
        """\
attention.qkv.norm.weight: bf16[64] = input
x: bf16[2, 8, 64] = input
attention.qkv.q.weight: bf16[64, 64] = input
attention.qkv.k.weight: bf16[64, 64] = input
attention.qkv.v.weight: bf16[64, 64] = input
attention.o.weight: bf16[64, 64] = input
mlp.norm.weight: bf16[64] = input
mlp.gate.weight: bf16[128, 64] = input
mlp.up.weight: bf16[128, 64] = input
mlp.down.weight: bf16[64, 128] = input
rms_norm: (bf16[2, 8, 64], f32[16]) = te.rms_norm(x, attention.qkv.norm.weight, 1e-05, cast_before_weight=False, zero_centered=False)
linear: (bf16[2, 8, 64], f8e4m3[64, 16], f32[1], f8e4m3[64, 64], f32[1]) = te.linear(rms_norm[0], attention.qkv.q.weight, None, linear(x e4m3[row+column], w e4m3[row+column], dy e5m2[row+column]))
linear_1: (bf16[2, 8, 64], f8e4m3[64, 16], f32[1], f8e4m3[64, 64], f32[1]) = te.linear(rms_norm[0], attention.qkv.k.weight, None, linear(x e4m3[row+column], w e4m3[row+column], dy e5m2[row+column]))
linear_2: (bf16[2, 8, 64], f8e4m3[64, 16], f32[1], f8e4m3[64, 64], f32[1]) = te.linear(rms_norm[0], attention.qkv.v.weight, None, linear(x e4m3[row+column], w e4m3[row+column], dy e5m2[row+column]))
unflatten: bf16[2, 8, 2, 32] = linear[0].unflatten(-1, (2, 32))
transpose: bf16[2, 2, 8, 32] = unflatten.transpose(1, 2)
unflatten_1: bf16[2, 8, 2, 32] = linear_1[0].unflatten(-1, (2, 32))
transpose_1: bf16[2, 2, 8, 32] = unflatten_1.transpose(1, 2)
unflatten_2: bf16[2, 8, 2, 32] = linear_2[0].unflatten(-1, (2, 32))
transpose_2: bf16[2, 2, 8, 32] = unflatten_2.transpose(1, 2)
scaled_dot_product_attention: bf16[2, 2, 8, 32] = F.scaled_dot_product_attention(transpose, transpose_1, transpose_2, is_causal=True)
transpose_3: bf16[2, 8, 2, 32] = scaled_dot_product_attention.transpose(1, 2)
flatten: bf16[2, 8, 64] = transpose_3.flatten(-2)
linear_3: (bf16[2, 8, 64], f8e4m3[64, 16], f32[1], f8e4m3[64, 64], f32[1]) = te.linear(flatten, attention.o.weight, None, linear(x e4m3[row+column], w e4m3[row+column], dy e5m2[row+column]))
add: bf16[2, 8, 64] = x + linear_3[0]
rms_norm_1: (bf16[2, 8, 64], f32[16]) = te.rms_norm(add, mlp.norm.weight, 1e-05, cast_before_weight=False, zero_centered=False)
linear_4: (bf16[2, 8, 128], f8e4m3[64, 16], f32[1], f8e4m3[64, 128], f32[1]) = te.linear(rms_norm_1[0], mlp.gate.weight, None, linear(x e4m3[row+column], w e4m3[row+column], dy e5m2[row+column]))
linear_5: (bf16[2, 8, 128], f8e4m3[64, 16], f32[1], f8e4m3[64, 128], f32[1]) = te.linear(rms_norm_1[0], mlp.up.weight, None, linear(x e4m3[row+column], w e4m3[row+column], dy e5m2[row+column]))
gated: bf16[2, 8, 128] = te.gated(linear_4[0], linear_5[0], 'silu')
linear_6: (bf16[2, 8, 64], f8e4m3[128, 16], f32[1], f8e4m3[128, 64], f32[1]) = te.linear(gated, mlp.down.weight, None, linear(x e4m3[row+column], w e4m3[row+column], dy e5m2[row+column]))
add_1: bf16[2, 8, 64] = add + linear_6[0]
return add_1""",
    )


def test_joint(graphs: dict[str, str]) -> None:
    """Seven linears in 18 quantizations: 7 weights, 7 gradients, 4 inputs, since q, k and v share theirs, and gate and up."""
    assert_expected_inline(
        graphs["joint"],
        """\
attention.qkv.norm.weight: bf16[64] = input
x: bf16[2, 8, 64] = input
attention.qkv.q.weight: bf16[64, 64] = input
attention.qkv.k.weight: bf16[64, 64] = input
attention.qkv.v.weight: bf16[64, 64] = input
attention.o.weight: bf16[64, 64] = input
mlp.norm.weight: bf16[64] = input
mlp.gate.weight: bf16[128, 64] = input
mlp.up.weight: bf16[128, 64] = input
mlp.down.weight: bf16[64, 128] = input
tangents_1: bf16[2, 8, 64] = input
rms_norm: (bf16[2, 8, 64], f32[16]) = te.rms_norm(x, attention.qkv.norm.weight, 1e-05, cast_before_weight=False, zero_centered=False)
quantize: (f8e4m3[16, 64], f8e4m3[64, 16], f32[1]) = te.quantize(rms_norm[0], e4m3[row+column])
quantize_1: (f8e4m3[64, 64], f8e4m3[64, 64], f32[1]) = te.quantize(attention.qkv.q.weight, e4m3[row+column])
gemm: bf16[16, 64] = te.gemm([quantize[0], quantize[2]], e4m3[row], [quantize_1[0], quantize_1[2]], e4m3[row], bf16, fast_accum=False)
view: bf16[2, 8, 64] = aten.view(gemm, [2, 8, 64])
quantize_2: (f8e4m3[64, 64], f8e4m3[64, 64], f32[1]) = te.quantize(attention.qkv.k.weight, e4m3[row+column])
gemm_1: bf16[16, 64] = te.gemm([quantize[0], quantize[2]], e4m3[row], [quantize_2[0], quantize_2[2]], e4m3[row], bf16, fast_accum=False)
view_1: bf16[2, 8, 64] = aten.view(gemm_1, [2, 8, 64])
quantize_3: (f8e4m3[64, 64], f8e4m3[64, 64], f32[1]) = te.quantize(attention.qkv.v.weight, e4m3[row+column])
gemm_2: bf16[16, 64] = te.gemm([quantize[0], quantize[2]], e4m3[row], [quantize_3[0], quantize_3[2]], e4m3[row], bf16, fast_accum=False)
view_2: bf16[2, 8, 64] = aten.view(gemm_2, [2, 8, 64])
view_3: bf16[2, 8, 2, 32] = aten.view(view, [2, 8, 2, 32])
transpose: bf16[2, 2, 8, 32] = aten.transpose(view_3, 1, 2)
view_4: bf16[2, 8, 2, 32] = aten.view(view_1, [2, 8, 2, 32])
transpose_1: bf16[2, 2, 8, 32] = aten.transpose(view_4, 1, 2)
view_5: bf16[2, 8, 2, 32] = aten.view(view_2, [2, 8, 2, 32])
transpose_2: bf16[2, 2, 8, 32] = aten.transpose(view_5, 1, 2)
scaled_dot_product_flash_attention_for_cpu: (bf16[2, 2, 8, 32], f32[2, 2, 8]) = aten._scaled_dot_product_flash_attention_for_cpu(transpose, transpose_1, transpose_2, is_causal=True)
detach: bf16[2, 2, 8, 32] = aten.detach(scaled_dot_product_flash_attention_for_cpu[0])
transpose_3: bf16[2, 8, 2, 32] = aten.transpose(scaled_dot_product_flash_attention_for_cpu[0], 1, 2)
view_6: bf16[2, 8, 64] = aten.view(transpose_3, [2, 8, 64])
quantize_4: (f8e4m3[16, 64], f8e4m3[64, 16], f32[1]) = te.quantize(view_6, e4m3[row+column])
quantize_5: (f8e4m3[64, 64], f8e4m3[64, 64], f32[1]) = te.quantize(attention.o.weight, e4m3[row+column])
gemm_3: bf16[16, 64] = te.gemm([quantize_4[0], quantize_4[2]], e4m3[row], [quantize_5[0], quantize_5[2]], e4m3[row], bf16, fast_accum=False)
view_7: bf16[2, 8, 64] = aten.view(gemm_3, [2, 8, 64])
add: bf16[2, 8, 64] = aten.add(x, view_7)
rms_norm_1: (bf16[2, 8, 64], f32[16]) = te.rms_norm(add, mlp.norm.weight, 1e-05, cast_before_weight=False, zero_centered=False)
quantize_6: (f8e4m3[16, 64], f8e4m3[64, 16], f32[1]) = te.quantize(rms_norm_1[0], e4m3[row+column])
quantize_stacked: (f8e4m3[256, 64], f8e4m3[64, 256], f32[2]) = te.quantize_stacked([mlp.gate.weight, mlp.up.weight], e4m3[row+column], by_columns=False)
gemm_4: bf16[16, 256] = te.gemm([quantize_6[0], quantize_6[2]], e4m3[row], [quantize_stacked[0], quantize_stacked[2]], e4m3[row], bf16, fast_accum=False, along='N', segments=[128, 128])
slice: bf16[16, 128] = aten.slice(gemm_4, 1, 0, 128)
view_8: bf16[2, 8, 128] = aten.view(slice, [2, 8, 128])
slice_1: bf16[16, 128] = aten.slice(gemm_4, 1, 128, 256)
view_9: bf16[2, 8, 128] = aten.view(slice_1, [2, 8, 128])
gated: bf16[2, 8, 128] = te.gated(view_8, view_9, 'silu')
quantize_7: (f8e4m3[16, 128], f8e4m3[128, 16], f32[1]) = te.quantize(gated, e4m3[row+column])
quantize_8: (f8e4m3[64, 128], f8e4m3[128, 64], f32[1]) = te.quantize(mlp.down.weight, e4m3[row+column])
gemm_5: bf16[16, 64] = te.gemm([quantize_7[0], quantize_7[2]], e4m3[row], [quantize_8[0], quantize_8[2]], e4m3[row], bf16, fast_accum=False)
view_10: bf16[2, 8, 64] = aten.view(gemm_5, [2, 8, 64])
add_1: bf16[2, 8, 64] = aten.add(add, view_10)
quantize_9: (f8e5m2[16, 64], f8e5m2[64, 16], f32[1]) = te.quantize(tangents_1, e5m2[row+column])
gemm_6: bf16[16, 128] = te.gemm([quantize_9[0], quantize_9[2]], e5m2[row], [quantize_8[1], quantize_8[2]], e4m3[column], bf16, fast_accum=False)
gemm_7: bf16[64, 128] = te.gemm([quantize_9[1], quantize_9[2]], e5m2[column], [quantize_7[1], quantize_7[2]], e4m3[column], bf16, fast_accum=False)
view_11: bf16[2, 8, 128] = aten.view(gemm_6, [2, 8, 128])
gated_backward: (bf16[2, 8, 128], bf16[2, 8, 128]) = te.gated_backward(view_11, view_8, view_9, 'silu')
quantize_stacked_1: (f8e5m2[16, 256], f8e5m2[256, 16], f32[2]) = te.quantize_stacked([gated_backward[0], gated_backward[1]], e5m2[row+column], by_columns=True)
gemm_8: bf16[16, 64] = te.gemm([quantize_stacked_1[0], quantize_stacked_1[2]], e5m2[row], [quantize_stacked[1], quantize_stacked[2]], e4m3[column], bf16, fast_accum=False, along='K', segments=[128, 128])
gemm_9: bf16[256, 64] = te.gemm([quantize_stacked_1[1], quantize_stacked_1[2]], e5m2[column], [quantize_6[1], quantize_6[2]], e4m3[column], bf16, fast_accum=False, along='M', segments=[128, 128])
slice_2: bf16[128, 64] = aten.slice(gemm_9, start=128, end=256)
slice_3: bf16[128, 64] = aten.slice(gemm_9, start=0, end=128)
view_12: bf16[2, 8, 64] = aten.view(gemm_8, [2, 8, 64])
to: f32[2, 8, 64] = view_12.to(f32)
view_13: f32[2, 8, 1] = aten.view(rms_norm_1[1], [2, 8, 1])
to_1: f32[2, 8, 64] = add.to(f32)
mul: f32[2, 8, 64] = aten.mul(to_1, view_13)
to_2: f32[64] = mlp.norm.weight.to(f32)
mul_1: f32[2, 8, 64] = aten.mul(to, to_2)
mul_2: f32[2, 8, 64] = aten.mul(to, mul)
sum: f32[64] = aten.sum(mul_2, [0, 1])
to_3: bf16[64] = sum.to(bf16)
mul_3: f32[2, 8, 64] = aten.mul(mul_1, mul)
mean: f32[2, 8, 1] = aten.mean(mul_3, [-1], keepdim=True)
mul_4: f32[2, 8, 64] = aten.mul(mul, mean)
sub: f32[2, 8, 64] = aten.sub(mul_1, mul_4)
mul_5: f32[2, 8, 64] = aten.mul(view_13, sub)
to_4: bf16[2, 8, 64] = mul_5.to(bf16)
add_2: bf16[2, 8, 64] = aten.add(tangents_1, to_4)
quantize_10: (f8e5m2[16, 64], f8e5m2[64, 16], f32[1]) = te.quantize(add_2, e5m2[row+column])
gemm_10: bf16[16, 64] = te.gemm([quantize_10[0], quantize_10[2]], e5m2[row], [quantize_5[1], quantize_5[2]], e4m3[column], bf16, fast_accum=False)
gemm_11: bf16[64, 64] = te.gemm([quantize_10[1], quantize_10[2]], e5m2[column], [quantize_4[1], quantize_4[2]], e4m3[column], bf16, fast_accum=False)
view_14: bf16[2, 8, 64] = aten.view(gemm_10, [2, 8, 64])
view_15: bf16[2, 8, 2, 32] = aten.view(view_14, [2, 8, 2, 32])
transpose_4: bf16[2, 2, 8, 32] = aten.transpose(view_15, 1, 2)
detach_1: bf16[2, 2, 8, 32] = aten.detach(detach)
scaled_dot_product_flash_attention_for_cpu_backward: (bf16[2, 2, 8, 32], bf16[2, 2, 8, 32], bf16[2, 2, 8, 32]) = aten._scaled_dot_product_flash_attention_for_cpu_backward(transpose_4, transpose, transpose_1, transpose_2, detach_1, scaled_dot_product_flash_attention_for_cpu[1], 0.0, is_causal=True)
transpose_5: bf16[2, 8, 2, 32] = aten.transpose(scaled_dot_product_flash_attention_for_cpu_backward[2], 1, 2)
view_16: bf16[2, 8, 64] = aten.view(transpose_5, [2, 8, 64])
transpose_6: bf16[2, 8, 2, 32] = aten.transpose(scaled_dot_product_flash_attention_for_cpu_backward[1], 1, 2)
view_17: bf16[2, 8, 64] = aten.view(transpose_6, [2, 8, 64])
transpose_7: bf16[2, 8, 2, 32] = aten.transpose(scaled_dot_product_flash_attention_for_cpu_backward[0], 1, 2)
view_18: bf16[2, 8, 64] = aten.view(transpose_7, [2, 8, 64])
quantize_11: (f8e5m2[16, 64], f8e5m2[64, 16], f32[1]) = te.quantize(view_16, e5m2[row+column])
gemm_12: bf16[16, 64] = te.gemm([quantize_11[0], quantize_11[2]], e5m2[row], [quantize_3[1], quantize_3[2]], e4m3[column], bf16, fast_accum=False)
gemm_13: bf16[64, 64] = te.gemm([quantize_11[1], quantize_11[2]], e5m2[column], [quantize[1], quantize[2]], e4m3[column], bf16, fast_accum=False)
view_19: bf16[2, 8, 64] = aten.view(gemm_12, [2, 8, 64])
quantize_12: (f8e5m2[16, 64], f8e5m2[64, 16], f32[1]) = te.quantize(view_17, e5m2[row+column])
gemm_14: bf16[16, 64] = te.gemm([quantize_12[0], quantize_12[2]], e5m2[row], [quantize_2[1], quantize_2[2]], e4m3[column], bf16, fast_accum=False)
gemm_15: bf16[64, 64] = te.gemm([quantize_12[1], quantize_12[2]], e5m2[column], [quantize[1], quantize[2]], e4m3[column], bf16, fast_accum=False)
view_20: bf16[2, 8, 64] = aten.view(gemm_14, [2, 8, 64])
add_3: bf16[2, 8, 64] = aten.add(view_19, view_20)
quantize_13: (f8e5m2[16, 64], f8e5m2[64, 16], f32[1]) = te.quantize(view_18, e5m2[row+column])
gemm_16: bf16[16, 64] = te.gemm([quantize_13[0], quantize_13[2]], e5m2[row], [quantize_1[1], quantize_1[2]], e4m3[column], bf16, fast_accum=False)
gemm_17: bf16[64, 64] = te.gemm([quantize_13[1], quantize_13[2]], e5m2[column], [quantize[1], quantize[2]], e4m3[column], bf16, fast_accum=False)
view_21: bf16[2, 8, 64] = aten.view(gemm_16, [2, 8, 64])
add_4: bf16[2, 8, 64] = aten.add(add_3, view_21)
to_5: f32[2, 8, 64] = add_4.to(f32)
view_22: f32[2, 8, 1] = aten.view(rms_norm[1], [2, 8, 1])
to_6: f32[2, 8, 64] = x.to(f32)
mul_6: f32[2, 8, 64] = aten.mul(to_6, view_22)
to_7: f32[64] = attention.qkv.norm.weight.to(f32)
mul_7: f32[2, 8, 64] = aten.mul(to_5, to_7)
mul_8: f32[2, 8, 64] = aten.mul(to_5, mul_6)
sum_1: f32[64] = aten.sum(mul_8, [0, 1])
to_8: bf16[64] = sum_1.to(bf16)
mul_9: f32[2, 8, 64] = aten.mul(mul_7, mul_6)
mean_1: f32[2, 8, 1] = aten.mean(mul_9, [-1], keepdim=True)
mul_10: f32[2, 8, 64] = aten.mul(mul_6, mean_1)
sub_1: f32[2, 8, 64] = aten.sub(mul_7, mul_10)
mul_11: f32[2, 8, 64] = aten.mul(view_22, sub_1)
to_9: bf16[2, 8, 64] = mul_11.to(bf16)
add_5: bf16[2, 8, 64] = aten.add(add_2, to_9)
return add_1, to_8, add_5, gemm_17, gemm_15, gemm_13, gemm_11, to_3, slice_3, slice_2, gemm_7""",
    )


def test_forward(graphs: dict[str, str]) -> None:
    """Four te operations write FP8 for others to read: two norms, SwiGLU, and a plain te.quantize behind attention."""
    assert_expected_inline(
        graphs["forward"],
        """\
attention.qkv.norm.weight: bf16[64] = input
x: bf16[2, 8, 64] = input
attention.qkv.q.weight: bf16[64, 64] = input
attention.qkv.k.weight: bf16[64, 64] = input
attention.qkv.v.weight: bf16[64, 64] = input
attention.o.weight: bf16[64, 64] = input
mlp.norm.weight: bf16[64] = input
mlp.gate.weight: bf16[128, 64] = input
mlp.up.weight: bf16[128, 64] = input
mlp.down.weight: bf16[64, 128] = input
rms_norm_quantize: (f32[16], f8e4m3[16, 64], f8e4m3[64, 16], f32[1]) = te.rms_norm_quantize(x, attention.qkv.norm.weight, 1e-05, cast_before_weight=False, zero_centered=False, quantizer=e4m3[row+column], keep_output=False)
quantize: (f8e4m3[64, 64], f8e4m3[64, 64], f32[1]) = te.quantize(attention.qkv.q.weight, e4m3[row+column])
gemm: bf16[16, 64] = te.gemm([rms_norm_quantize[1], rms_norm_quantize[3]], e4m3[row], [quantize[0], quantize[2]], e4m3[row], bf16, fast_accum=False)
view: bf16[2, 8, 64] = aten.view(gemm, [2, 8, 64])
quantize_1: (f8e4m3[64, 64], f8e4m3[64, 64], f32[1]) = te.quantize(attention.qkv.k.weight, e4m3[row+column])
gemm_1: bf16[16, 64] = te.gemm([rms_norm_quantize[1], rms_norm_quantize[3]], e4m3[row], [quantize_1[0], quantize_1[2]], e4m3[row], bf16, fast_accum=False)
view_1: bf16[2, 8, 64] = aten.view(gemm_1, [2, 8, 64])
quantize_2: (f8e4m3[64, 64], f8e4m3[64, 64], f32[1]) = te.quantize(attention.qkv.v.weight, e4m3[row+column])
gemm_2: bf16[16, 64] = te.gemm([rms_norm_quantize[1], rms_norm_quantize[3]], e4m3[row], [quantize_2[0], quantize_2[2]], e4m3[row], bf16, fast_accum=False)
view_2: bf16[2, 8, 64] = aten.view(gemm_2, [2, 8, 64])
view_3: bf16[2, 8, 2, 32] = aten.view(view, [2, 8, 2, 32])
transpose: bf16[2, 2, 8, 32] = aten.transpose(view_3, 1, 2)
view_4: bf16[2, 8, 2, 32] = aten.view(view_1, [2, 8, 2, 32])
transpose_1: bf16[2, 2, 8, 32] = aten.transpose(view_4, 1, 2)
view_5: bf16[2, 8, 2, 32] = aten.view(view_2, [2, 8, 2, 32])
transpose_2: bf16[2, 2, 8, 32] = aten.transpose(view_5, 1, 2)
scaled_dot_product_flash_attention_for_cpu: (bf16[2, 2, 8, 32], f32[2, 2, 8]) = aten._scaled_dot_product_flash_attention_for_cpu(transpose, transpose_1, transpose_2, is_causal=True)
detach: bf16[2, 2, 8, 32] = aten.detach(scaled_dot_product_flash_attention_for_cpu[0])
transpose_3: bf16[2, 8, 2, 32] = aten.transpose(scaled_dot_product_flash_attention_for_cpu[0], 1, 2)
view_6: bf16[2, 8, 64] = aten.view(transpose_3, [2, 8, 64])
quantize_3: (f8e4m3[16, 64], f8e4m3[64, 16], f32[1]) = te.quantize(view_6, e4m3[row+column])
quantize_4: (f8e4m3[64, 64], f8e4m3[64, 64], f32[1]) = te.quantize(attention.o.weight, e4m3[row+column])
gemm_3: bf16[16, 64] = te.gemm([quantize_3[0], quantize_3[2]], e4m3[row], [quantize_4[0], quantize_4[2]], e4m3[row], bf16, fast_accum=False)
view_7: bf16[2, 8, 64] = aten.view(gemm_3, [2, 8, 64])
add_rms_norm_quantize: (bf16[2, 8, 64], f32[16], f8e4m3[16, 64], f8e4m3[64, 16], f32[1]) = te.add_rms_norm_quantize(x, view_7, mlp.norm.weight, 1e-05, cast_before_weight=False, zero_centered=False, quantizer=e4m3[row+column], keep_output=False)
quantize_stacked: (f8e4m3[256, 64], f8e4m3[64, 256], f32[2]) = te.quantize_stacked([mlp.gate.weight, mlp.up.weight], e4m3[row+column], by_columns=False)
gemm_gated: (bf16[16, 256], f32[512]) = te.gemm_gated([add_rms_norm_quantize[2], add_rms_norm_quantize[4]], e4m3[row], [quantize_stacked[0], quantize_stacked[2]], e4m3[row], fast_accum=False, gate=0, kind='silu')
slice: bf16[16, 128] = aten.slice(gemm_gated[0], 1, 0, 128)
view_8: bf16[2, 8, 128] = aten.view(slice, [2, 8, 128])
slice_1: bf16[16, 128] = aten.slice(gemm_gated[0], 1, 128, 256)
view_9: bf16[2, 8, 128] = aten.view(slice_1, [2, 8, 128])
gated_quantize: (f8e4m3[16, 128], f8e4m3[128, 16], f32[1]) = te.gated_quantize(view_8, view_9, 'silu', e4m3[row+column], keep_output=False, amax=gemm_gated[1])
quantize_5: (f8e4m3[64, 128], f8e4m3[128, 64], f32[1]) = te.quantize(mlp.down.weight, e4m3[row+column])
view_10: bf16[16, 64] = aten.view(add_rms_norm_quantize[0], [16, 64])
gemm_4: bf16[16, 64] = te.gemm([gated_quantize[0], gated_quantize[2]], e4m3[row], [quantize_5[0], quantize_5[2]], e4m3[row], bf16, fast_accum=False, addend=view_10)
view_11: bf16[2, 8, 64] = aten.view(gemm_4, [2, 8, 64])
view_12: f32[2, 8, 1] = aten.view(add_rms_norm_quantize[1], [2, 8, 1])
detach_1: bf16[2, 2, 8, 32] = aten.detach(detach)
view_13: f32[2, 8, 1] = aten.view(rms_norm_quantize[0], [2, 8, 1])
return view_11, attention.qkv.norm.weight, x, mlp.norm.weight, rms_norm_quantize[2], rms_norm_quantize[3], quantize[1], quantize[2], quantize_1[1], quantize_1[2], quantize_2[1], quantize_2[2], transpose, transpose_1, transpose_2, scaled_dot_product_flash_attention_for_cpu[1], quantize_3[1], quantize_3[2], quantize_4[1], quantize_4[2], add_rms_norm_quantize[0], add_rms_norm_quantize[3], add_rms_norm_quantize[4], quantize_stacked[1], quantize_stacked[2], view_8, view_9, gated_quantize[1], gated_quantize[2], quantize_5[1], quantize_5[2], view_12, detach_1, view_13""",
    )


def test_backward(graphs: dict[str, str]) -> None:
    """The residual's gradient (aten.add) goes straight into te.quantize: Inductor computes its amax where it writes it."""
    assert_expected_inline(
        graphs["backward"],
        """\
attention.qkv.norm.weight: bf16[64] = input
x: bf16[2, 8, 64] = input
mlp.norm.weight: bf16[64] = input
rms_norm_quantize[2]: f8e4m3[64, 16] = input
rms_norm_quantize[3]: f32[1] = input
quantize[1]: f8e4m3[64, 64] = input
quantize[2]: f32[1] = input
quantize_1[1]: f8e4m3[64, 64] = input
quantize_1[2]: f32[1] = input
quantize_2[1]: f8e4m3[64, 64] = input
quantize_2[2]: f32[1] = input
transpose: bf16[2, 2, 8, 32] = input
transpose_1: bf16[2, 2, 8, 32] = input
transpose_2: bf16[2, 2, 8, 32] = input
scaled_dot_product_flash_attention_for_cpu[1]: f32[2, 2, 8] = input
quantize_3[1]: f8e4m3[64, 16] = input
quantize_3[2]: f32[1] = input
quantize_4[1]: f8e4m3[64, 64] = input
quantize_4[2]: f32[1] = input
add_rms_norm_quantize[0]: bf16[2, 8, 64] = input
add_rms_norm_quantize[3]: f8e4m3[64, 16] = input
add_rms_norm_quantize[4]: f32[1] = input
quantize_stacked[1]: f8e4m3[64, 256] = input
quantize_stacked[2]: f32[2] = input
view_8: bf16[2, 8, 128] = input
view_9: bf16[2, 8, 128] = input
gated_quantize[1]: f8e4m3[128, 16] = input
gated_quantize[2]: f32[1] = input
quantize_5[1]: f8e4m3[128, 64] = input
quantize_5[2]: f32[1] = input
view_12: f32[2, 8, 1] = input
detach_1: bf16[2, 2, 8, 32] = input
view_13: f32[2, 8, 1] = input
tangents_1: bf16[2, 8, 64] = input
quantize_6: (f8e5m2[16, 64], f8e5m2[64, 16], f32[1]) = te.quantize(tangents_1, e5m2[row+column])
gemm: bf16[16, 128] = te.gemm([quantize_6[0], quantize_6[2]], e5m2[row], [quantize_5[1], quantize_5[2]], e4m3[column], bf16, fast_accum=False)
view: bf16[2, 8, 128] = aten.view(gemm, [2, 8, 128])
gated_backward_quantize: (f8e5m2[16, 256], f32[2]) = te.gated_backward_quantize(view, view_8, view_9, 'silu', e5m2[row], keep_output=False, stacked=True)
gemm_1: bf16[16, 64] = te.gemm([gated_backward_quantize[0], gated_backward_quantize[1]], e5m2[row], [quantize_stacked[1], quantize_stacked[2]], e4m3[column], bf16, fast_accum=False, along='K', segments=[128, 128])
transpose_3: f8e5m2[256, 16] = te.transpose(gated_backward_quantize[0])
view_1: bf16[2, 8, 64] = aten.view(gemm_1, [2, 8, 64])
to: f32[2, 8, 64] = view_1.to(f32)
to_1: f32[2, 8, 64] = add_rms_norm_quantize[0].to(f32)
mul: f32[2, 8, 64] = aten.mul(to_1, view_12)
to_2: f32[64] = mlp.norm.weight.to(f32)
mul_1: f32[2, 8, 64] = aten.mul(to, to_2)
mul_2: f32[2, 8, 64] = aten.mul(to, mul)
sum: f32[64] = aten.sum(mul_2, [0, 1])
to_3: bf16[64] = sum.to(bf16)
mul_3: f32[2, 8, 64] = aten.mul(mul_1, mul)
mean: f32[2, 8, 1] = aten.mean(mul_3, [-1], keepdim=True)
mul_4: f32[2, 8, 64] = aten.mul(mul, mean)
sub: f32[2, 8, 64] = aten.sub(mul_1, mul_4)
mul_5: f32[2, 8, 64] = aten.mul(view_12, sub)
to_4: bf16[2, 8, 64] = mul_5.to(bf16)
add: bf16[2, 8, 64] = aten.add(tangents_1, to_4)
quantize_7: (f8e5m2[16, 64], f8e5m2[64, 16], f32[1]) = te.quantize(add, e5m2[row+column])
gemm_2: bf16[16, 64] = te.gemm([quantize_7[0], quantize_7[2]], e5m2[row], [quantize_4[1], quantize_4[2]], e4m3[column], bf16, fast_accum=False)
view_2: bf16[2, 8, 64] = aten.view(gemm_2, [2, 8, 64])
view_3: bf16[2, 8, 2, 32] = aten.view(view_2, [2, 8, 2, 32])
transpose_4: bf16[2, 2, 8, 32] = aten.transpose(view_3, 1, 2)
scaled_dot_product_flash_attention_for_cpu_backward: (bf16[2, 2, 8, 32], bf16[2, 2, 8, 32], bf16[2, 2, 8, 32]) = aten._scaled_dot_product_flash_attention_for_cpu_backward(transpose_4, transpose, transpose_1, transpose_2, detach_1, scaled_dot_product_flash_attention_for_cpu[1], 0.0, is_causal=True)
transpose_5: bf16[2, 8, 2, 32] = aten.transpose(scaled_dot_product_flash_attention_for_cpu_backward[2], 1, 2)
view_4: bf16[2, 8, 64] = aten.view(transpose_5, [2, 8, 64])
transpose_6: bf16[2, 8, 2, 32] = aten.transpose(scaled_dot_product_flash_attention_for_cpu_backward[1], 1, 2)
view_5: bf16[2, 8, 64] = aten.view(transpose_6, [2, 8, 64])
transpose_7: bf16[2, 8, 2, 32] = aten.transpose(scaled_dot_product_flash_attention_for_cpu_backward[0], 1, 2)
view_6: bf16[2, 8, 64] = aten.view(transpose_7, [2, 8, 64])
quantize_8: (f8e5m2[16, 64], f8e5m2[64, 16], f32[1]) = te.quantize(view_4, e5m2[row+column])
gemm_3: bf16[16, 64] = te.gemm([quantize_8[0], quantize_8[2]], e5m2[row], [quantize_2[1], quantize_2[2]], e4m3[column], bf16, fast_accum=False)
view_7: bf16[2, 8, 64] = aten.view(gemm_3, [2, 8, 64])
quantize_9: (f8e5m2[16, 64], f8e5m2[64, 16], f32[1]) = te.quantize(view_5, e5m2[row+column])
gemm_4: bf16[16, 64] = te.gemm([quantize_9[0], quantize_9[2]], e5m2[row], [quantize_1[1], quantize_1[2]], e4m3[column], bf16, fast_accum=False)
view_10: bf16[2, 8, 64] = aten.view(gemm_4, [2, 8, 64])
add_1: bf16[2, 8, 64] = aten.add(view_7, view_10)
quantize_10: (f8e5m2[16, 64], f8e5m2[64, 16], f32[1]) = te.quantize(view_6, e5m2[row+column])
gemm_5: bf16[16, 64] = te.gemm([quantize_10[0], quantize_10[2]], e5m2[row], [quantize[1], quantize[2]], e4m3[column], bf16, fast_accum=False)
gemm_6: bf16[64, 64] = te.gemm([quantize_10[1], quantize_10[2]], e5m2[column], [rms_norm_quantize[2], rms_norm_quantize[3]], e4m3[column], bf16, fast_accum=False)
view_11: bf16[2, 8, 64] = aten.view(gemm_5, [2, 8, 64])
add_2: bf16[2, 8, 64] = aten.add(add_1, view_11)
to_5: f32[2, 8, 64] = add_2.to(f32)
to_6: f32[2, 8, 64] = x.to(f32)
mul_6: f32[2, 8, 64] = aten.mul(to_6, view_13)
to_7: f32[64] = attention.qkv.norm.weight.to(f32)
mul_7: f32[2, 8, 64] = aten.mul(to_5, to_7)
mul_8: f32[2, 8, 64] = aten.mul(to_5, mul_6)
sum_1: f32[64] = aten.sum(mul_8, [0, 1])
to_8: bf16[64] = sum_1.to(bf16)
mul_9: f32[2, 8, 64] = aten.mul(mul_7, mul_6)
mean_1: f32[2, 8, 1] = aten.mean(mul_9, [-1], keepdim=True)
mul_10: f32[2, 8, 64] = aten.mul(mul_6, mean_1)
sub_1: f32[2, 8, 64] = aten.sub(mul_7, mul_10)
mul_11: f32[2, 8, 64] = aten.mul(view_13, sub_1)
to_9: bf16[2, 8, 64] = mul_11.to(bf16)
add_3: bf16[2, 8, 64] = aten.add(add, to_9)
gemm_7: bf16[64, 64] = te.gemm([quantize_9[1], quantize_9[2]], e5m2[column], [rms_norm_quantize[2], rms_norm_quantize[3]], e4m3[column], bf16, fast_accum=False)
gemm_8: bf16[64, 64] = te.gemm([quantize_8[1], quantize_8[2]], e5m2[column], [rms_norm_quantize[2], rms_norm_quantize[3]], e4m3[column], bf16, fast_accum=False)
gemm_9: bf16[64, 64] = te.gemm([quantize_7[1], quantize_7[2]], e5m2[column], [quantize_3[1], quantize_3[2]], e4m3[column], bf16, fast_accum=False)
gemm_10: bf16[256, 64] = te.gemm([transpose_3, gated_backward_quantize[1]], e5m2[column], [add_rms_norm_quantize[3], add_rms_norm_quantize[4]], e4m3[column], bf16, fast_accum=False, along='M', segments=[128, 128])
slice: bf16[128, 64] = aten.slice(gemm_10, start=128, end=256)
slice_1: bf16[128, 64] = aten.slice(gemm_10, start=0, end=128)
gemm_11: bf16[64, 128] = te.gemm([quantize_6[1], quantize_6[2]], e5m2[column], [gated_quantize[1], gated_quantize[2]], e4m3[column], bf16, fast_accum=False)
return to_8, add_3, gemm_6, gemm_7, gemm_8, gemm_9, to_3, slice_1, slice, gemm_11""",
    )


def test_inference(graphs: dict[str, str]) -> None:
    """The forward without column copies."""
    assert_expected_inline(
        graphs["inference"],
        """\
attention.qkv.norm.weight: bf16[64] = input
x: bf16[2, 8, 64] = input
attention.qkv.q.weight: bf16[64, 64] = input
attention.qkv.k.weight: bf16[64, 64] = input
attention.qkv.v.weight: bf16[64, 64] = input
attention.o.weight: bf16[64, 64] = input
mlp.norm.weight: bf16[64] = input
mlp.gate.weight: bf16[128, 64] = input
mlp.up.weight: bf16[128, 64] = input
mlp.down.weight: bf16[64, 128] = input
rms_norm_quantize: (f32[16], f8e4m3[16, 64], f32[1]) = te.rms_norm_quantize(x, attention.qkv.norm.weight, 1e-05, cast_before_weight=False, zero_centered=False, quantizer=e4m3[row], keep_output=False)
quantize: (f8e4m3[64, 64], f32[1]) = te.quantize(attention.qkv.q.weight, e4m3[row])
gemm: bf16[16, 64] = te.gemm([rms_norm_quantize[1], rms_norm_quantize[2]], e4m3[row], [quantize[0], quantize[1]], e4m3[row], bf16, fast_accum=False)
view: bf16[2, 8, 64] = aten.view(gemm, [2, 8, 64])
quantize_1: (f8e4m3[64, 64], f32[1]) = te.quantize(attention.qkv.k.weight, e4m3[row])
gemm_1: bf16[16, 64] = te.gemm([rms_norm_quantize[1], rms_norm_quantize[2]], e4m3[row], [quantize_1[0], quantize_1[1]], e4m3[row], bf16, fast_accum=False)
view_1: bf16[2, 8, 64] = aten.view(gemm_1, [2, 8, 64])
quantize_2: (f8e4m3[64, 64], f32[1]) = te.quantize(attention.qkv.v.weight, e4m3[row])
gemm_2: bf16[16, 64] = te.gemm([rms_norm_quantize[1], rms_norm_quantize[2]], e4m3[row], [quantize_2[0], quantize_2[1]], e4m3[row], bf16, fast_accum=False)
view_2: bf16[2, 8, 64] = aten.view(gemm_2, [2, 8, 64])
view_3: bf16[2, 8, 2, 32] = aten.view(view, [2, 8, 2, 32])
transpose: bf16[2, 2, 8, 32] = aten.transpose(view_3, 1, 2)
view_4: bf16[2, 8, 2, 32] = aten.view(view_1, [2, 8, 2, 32])
transpose_1: bf16[2, 2, 8, 32] = aten.transpose(view_4, 1, 2)
view_5: bf16[2, 8, 2, 32] = aten.view(view_2, [2, 8, 2, 32])
transpose_2: bf16[2, 2, 8, 32] = aten.transpose(view_5, 1, 2)
scaled_dot_product_flash_attention_for_cpu: (bf16[2, 2, 8, 32], f32[2, 2, 8]) = aten._scaled_dot_product_flash_attention_for_cpu(transpose, transpose_1, transpose_2, is_causal=True)
transpose_3: bf16[2, 8, 2, 32] = aten.transpose(scaled_dot_product_flash_attention_for_cpu[0], 1, 2)
view_6: bf16[2, 8, 64] = aten.view(transpose_3, [2, 8, 64])
quantize_3: (f8e4m3[16, 64], f32[1]) = te.quantize(view_6, e4m3[row])
quantize_4: (f8e4m3[64, 64], f32[1]) = te.quantize(attention.o.weight, e4m3[row])
gemm_3: bf16[16, 64] = te.gemm([quantize_3[0], quantize_3[1]], e4m3[row], [quantize_4[0], quantize_4[1]], e4m3[row], bf16, fast_accum=False)
view_7: bf16[2, 8, 64] = aten.view(gemm_3, [2, 8, 64])
add_rms_norm_quantize: (bf16[2, 8, 64], f32[16], f8e4m3[16, 64], f32[1]) = te.add_rms_norm_quantize(x, view_7, mlp.norm.weight, 1e-05, cast_before_weight=False, zero_centered=False, quantizer=e4m3[row], keep_output=False)
quantize_stacked: (f8e4m3[256, 64], f32[2]) = te.quantize_stacked([mlp.gate.weight, mlp.up.weight], e4m3[row], by_columns=False)
gemm_gated: (bf16[16, 256], f32[512]) = te.gemm_gated([add_rms_norm_quantize[2], add_rms_norm_quantize[3]], e4m3[row], [quantize_stacked[0], quantize_stacked[1]], e4m3[row], fast_accum=False, gate=0, kind='silu')
slice: bf16[16, 128] = aten.slice(gemm_gated[0], 1, 0, 128)
view_8: bf16[2, 8, 128] = aten.view(slice, [2, 8, 128])
slice_1: bf16[16, 128] = aten.slice(gemm_gated[0], 1, 128, 256)
view_9: bf16[2, 8, 128] = aten.view(slice_1, [2, 8, 128])
gated_quantize: (f8e4m3[16, 128], f32[1]) = te.gated_quantize(view_8, view_9, 'silu', e4m3[row], keep_output=False, amax=gemm_gated[1])
quantize_5: (f8e4m3[64, 128], f32[1]) = te.quantize(mlp.down.weight, e4m3[row])
view_10: bf16[16, 64] = aten.view(add_rms_norm_quantize[0], [16, 64])
gemm_4: bf16[16, 64] = te.gemm([gated_quantize[0], gated_quantize[1]], e4m3[row], [quantize_5[0], quantize_5[1]], e4m3[row], bf16, fast_accum=False, addend=view_10)
view_11: bf16[2, 8, 64] = aten.view(gemm_4, [2, 8, 64])
return view_11""",
    )


def test_fake_cuda_gives_the_same_graphs() -> None:
    """Attention is held to its plain form here: which kernel torch would take depends on the machine's GPU."""
    with sdpa_kernel(SDPBackend.MATH):
        on_cuda, on_cpu = (snapshot(Block, SHAPE, device) for device in ("cuda", "cpu"))
    assert on_cuda.keys() == on_cpu.keys()
    for stage, text in on_cuda.items():
        assert text.replace("device=cuda", "device=cpu") == on_cpu[stage]
