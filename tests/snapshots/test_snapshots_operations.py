"""Each shipped fusion of operations by itself: the graphs without it, and what comes in place of which lines, forward and backward."""

from __future__ import annotations

from expecttest import assert_expected_inline
from helpers.graphs.operation_graphs import before_and_after
from helpers.graphs.operation_lists import BY_NAME, LISTS


def snapshot(name: str) -> str:
    """Both halves without that fusion, and what it alone changes."""
    return before_and_after(LISTS[name], BY_NAME[name])


def test_every_shipped_fusion_has_its_snapshot() -> None:
    assert set(LISTS) == set(BY_NAME)


def test_linear_bias_add() -> None:
    assert_expected_inline(
        snapshot("fuse_linear_bias_add"),
        """\
forward of BasicLinear, Bias, AddExtraInput:
quantize: (f8e4m3[32, 64], f8e4m3[64, 32], f32[1]) = te.quantize(input, e4m3[row+column])
quantize_1: (f8e4m3[64, 64], f8e4m3[64, 64], f32[1]) = te.quantize(0.weight, e4m3[row+column])
gemm: bf16[32, 64] = te.gemm([quantize[0], quantize[2]], e4m3[row], [quantize_1[0], quantize_1[2]], e4m3[row], bf16, fast_accum=False)
add: bf16[32, 64] = aten.add(gemm, 1.bias)
add_1: bf16[32, 64] = aten.add(add, extra_inputs_0)
return add_1, quantize[1], quantize[2], quantize_1[1], quantize_1[2]

forward of ForwardLinearBiasAdd:
@@ -3,4 +3,2 @@
+gemm: bf16[32, 64] = te.gemm([quantize[0], quantize[2]], e4m3[row], [quantize_1[0], quantize_1[2]], e4m3[row], bf16, fast_accum=False, bias=1.bias, addend=extra_inputs_0)
+return gemm, quantize[1], quantize[2], quantize_1[1], quantize_1[2]

backward of BasicLinear, Bias, AddExtraInput:
bias_grad: f32[64] = te.bias_grad(tangents_1)
to: bf16[64] = bias_grad.to(bf16)
quantize_2: (f8e5m2[32, 64], f8e5m2[64, 32], f32[1]) = te.quantize(tangents_1, e5m2[row+column])
gemm: bf16[32, 64] = te.gemm([quantize_2[0], quantize_2[2]], e5m2[row], [quantize_1[1], quantize_1[2]], e4m3[column], bf16, fast_accum=False)
gemm_1: bf16[64, 64] = te.gemm([quantize_2[1], quantize_2[2]], e5m2[column], [quantize[1], quantize[2]], e4m3[column], bf16, fast_accum=False)
return gemm, gemm_1, to, tangents_1""",
    )


def test_linear_scale_add() -> None:
    assert_expected_inline(
        snapshot("fuse_linear_scale_add"),
        """\
forward of BasicLinear, ConstantScale, AddExtraInput:
quantize: (f8e4m3[32, 64], f8e4m3[64, 32], f32[1]) = te.quantize(input, e4m3[row+column])
quantize_1: (f8e4m3[64, 64], f8e4m3[64, 64], f32[1]) = te.quantize(0.weight, e4m3[row+column])
gemm: bf16[32, 64] = te.gemm([quantize[0], quantize[2]], e4m3[row], [quantize_1[0], quantize_1[2]], e4m3[row], bf16, fast_accum=False)
mul: bf16[32, 64] = aten.mul(gemm, 0.5)
add: bf16[32, 64] = aten.add(mul, extra_inputs_0)
return add, quantize[1], quantize[2], quantize_1[1], quantize_1[2]

forward of ForwardLinearScaleAdd:
@@ -4,2 +4 @@
+add: bf16[32, 64] = aten.add(extra_inputs_0, gemm, alpha=0.5)

backward of BasicLinear, ConstantScale, AddExtraInput:
mul: bf16[32, 64] = aten.mul(tangents_1, 0.5)
quantize_2: (f8e5m2[32, 64], f8e5m2[64, 32], f32[1]) = te.quantize(mul, e5m2[row+column])
gemm: bf16[32, 64] = te.gemm([quantize_2[0], quantize_2[2]], e5m2[row], [quantize_1[1], quantize_1[2]], e4m3[column], bf16, fast_accum=False)
gemm_1: bf16[64, 64] = te.gemm([quantize_2[1], quantize_2[2]], e5m2[column], [quantize[1], quantize[2]], e4m3[column], bf16, fast_accum=False)
return gemm, gemm_1, tangents_1""",
    )


def test_linear_bias_activation() -> None:
    assert_expected_inline(
        snapshot("fuse_linear_bias_activation"),
        """\
forward of BasicLinear, Bias, GELU:
quantize: (f8e4m3[32, 64], f8e4m3[64, 32], f32[1]) = te.quantize(input, e4m3[row+column])
quantize_1: (f8e4m3[96, 64], f8e4m3[64, 96], f32[1]) = te.quantize(0.weight, e4m3[row+column])
gemm: bf16[32, 96] = te.gemm([quantize[0], quantize[2]], e4m3[row], [quantize_1[0], quantize_1[2]], e4m3[row], bf16, fast_accum=False)
add: bf16[32, 96] = aten.add(gemm, 1.bias)
activation: bf16[32, 96] = te.activation(add, 'gelu_tanh')
return activation, quantize[1], quantize[2], quantize_1[1], quantize_1[2], add

forward of ForwardLinearBiasActivation:
@@ -3,4 +3,3 @@
+gemm: bf16[32, 96] = te.gemm([quantize[0], quantize[2]], e4m3[row], [quantize_1[0], quantize_1[2]], e4m3[row], bf16, fast_accum=False, bias=1.bias)
+activation: bf16[32, 96] = te.activation(gemm, 'gelu_tanh')
+return activation, quantize[1], quantize[2], quantize_1[1], quantize_1[2], gemm

backward of BasicLinear, Bias, GELU:
activation_backward: bf16[32, 96] = te.activation_backward(tangents_1, add, 'gelu_tanh')
bias_grad: f32[96] = te.bias_grad(activation_backward)
to: bf16[96] = bias_grad.to(bf16)
quantize_2: (f8e5m2[32, 96], f8e5m2[96, 32], f32[1]) = te.quantize(activation_backward, e5m2[row+column])
gemm: bf16[32, 64] = te.gemm([quantize_2[0], quantize_2[2]], e5m2[row], [quantize_1[1], quantize_1[2]], e4m3[column], bf16, fast_accum=False)
gemm_1: bf16[96, 64] = te.gemm([quantize_2[1], quantize_2[2]], e5m2[column], [quantize[1], quantize[2]], e4m3[column], bf16, fast_accum=False)
return gemm, gemm_1, to""",
    )


def test_activation_bias() -> None:
    assert_expected_inline(
        snapshot("fuse_activation_bias"),
        """\
forward of BasicLinear, Bias, GELU:
quantize: (f8e4m3[32, 64], f8e4m3[64, 32], f32[1]) = te.quantize(input, e4m3[row+column])
quantize_1: (f8e4m3[96, 64], f8e4m3[64, 96], f32[1]) = te.quantize(0.weight, e4m3[row+column])
gemm: bf16[32, 96] = te.gemm([quantize[0], quantize[2]], e4m3[row], [quantize_1[0], quantize_1[2]], e4m3[row], bf16, fast_accum=False)
add: bf16[32, 96] = aten.add(gemm, 1.bias)
activation: bf16[32, 96] = te.activation(add, 'gelu')
return activation, quantize[1], quantize[2], quantize_1[1], quantize_1[2], add

backward of BasicLinear, Bias, GELU:
activation_backward: bf16[32, 96] = te.activation_backward(tangents_1, add, 'gelu')
bias_grad: f32[96] = te.bias_grad(activation_backward)
to: bf16[96] = bias_grad.to(bf16)
quantize_2: (f8e5m2[32, 96], f8e5m2[96, 32], f32[1]) = te.quantize(activation_backward, e5m2[row+column])
gemm: bf16[32, 64] = te.gemm([quantize_2[0], quantize_2[2]], e5m2[row], [quantize_1[1], quantize_1[2]], e4m3[column], bf16, fast_accum=False)
gemm_1: bf16[96, 64] = te.gemm([quantize_2[1], quantize_2[2]], e5m2[column], [quantize[1], quantize[2]], e4m3[column], bf16, fast_accum=False)
return gemm, gemm_1, to

backward of BackwardActivationBias:
@@ -1,7 +1,6 @@
+activation_backward_quantize: (f32[96], f8e5m2[32, 96], f32[1]) = te.activation_backward_quantize(tangents_1, add, 'gelu', e5m2[row], keep_output=False, bias_grad=True)
+gemm_2: bf16[32, 64] = te.gemm([activation_backward_quantize[1], activation_backward_quantize[2]], e5m2[row], [quantize_1[1], quantize_1[2]], e4m3[column], bf16, fast_accum=False)
+transpose: f8e5m2[96, 32] = te.transpose(activation_backward_quantize[1])
+gemm_3: bf16[96, 64] = te.gemm([transpose, activation_backward_quantize[2]], e5m2[column], [quantize[1], quantize[2]], e4m3[column], bf16, fast_accum=False)
+to: bf16[96] = activation_backward_quantize[0].to(bf16)
+return gemm_2, gemm_3, to""",
    )


def test_backward_linear_scale() -> None:
    assert_expected_inline(
        snapshot("fuse_backward_linear_scale"),
        """\
forward of BasicLinear, ConstantScale:
quantize: (f8e4m3[32, 64], f8e4m3[64, 32], f32[1]) = te.quantize(input, e4m3[row+column])
quantize_1: (f8e4m3[96, 64], f8e4m3[64, 96], f32[1]) = te.quantize(0.weight, e4m3[row+column])
gemm: bf16[32, 96] = te.gemm([quantize[0], quantize[2]], e4m3[row], [quantize_1[0], quantize_1[2]], e4m3[row], bf16, fast_accum=False)
mul: bf16[32, 96] = aten.mul(gemm, 0.5)
return mul, quantize[1], quantize[2], quantize_1[1], quantize_1[2]

backward of BasicLinear, ConstantScale:
mul: bf16[32, 96] = aten.mul(tangents_1, 0.5)
quantize_2: (f8e5m2[32, 96], f8e5m2[96, 32], f32[1]) = te.quantize(mul, e5m2[row+column])
gemm: bf16[32, 64] = te.gemm([quantize_2[0], quantize_2[2]], e5m2[row], [quantize_1[1], quantize_1[2]], e4m3[column], bf16, fast_accum=False)
gemm_1: bf16[96, 64] = te.gemm([quantize_2[1], quantize_2[2]], e5m2[column], [quantize[1], quantize[2]], e4m3[column], bf16, fast_accum=False)
return gemm, gemm_1

backward of BackwardLinearScale:
@@ -1,4 +1,4 @@
+quantize_2: (f8e5m2[32, 96], f8e5m2[96, 32], f32[1]) = te.quantize(tangents_1, e5m2[row+column])
+mul_1: f32[1] = aten.mul(quantize_2[2], 0.5)
+gemm: bf16[32, 64] = te.gemm([quantize_2[0], mul_1], e5m2[row], [quantize_1[1], quantize_1[2]], e4m3[column], bf16, fast_accum=False)
+gemm_1: bf16[96, 64] = te.gemm([quantize_2[1], mul_1], e5m2[column], [quantize[1], quantize[2]], e4m3[column], bf16, fast_accum=False)""",
    )


def test_backward_linear_add() -> None:
    assert_expected_inline(
        snapshot("fuse_backward_linear_add"),
        """\
forward of MakeExtraOutput, BasicLinear:
quantize: (f8e4m3[32, 64], f8e4m3[64, 32], f32[1]) = te.quantize(input, e4m3[row+column])
quantize_1: (f8e4m3[96, 64], f8e4m3[64, 96], f32[1]) = te.quantize(1.weight, e4m3[row+column])
gemm: bf16[32, 96] = te.gemm([quantize[0], quantize[2]], e4m3[row], [quantize_1[0], quantize_1[2]], e4m3[row], bf16, fast_accum=False)
clone: bf16[32, 64] = aten.clone(input)
return gemm, clone, quantize[1], quantize[2], quantize_1[1], quantize_1[2]

backward of MakeExtraOutput, BasicLinear:
quantize_2: (f8e5m2[32, 96], f8e5m2[96, 32], f32[1]) = te.quantize(tangents_1, e5m2[row+column])
gemm: bf16[32, 64] = te.gemm([quantize_2[0], quantize_2[2]], e5m2[row], [quantize_1[1], quantize_1[2]], e4m3[column], bf16, fast_accum=False)
gemm_1: bf16[96, 64] = te.gemm([quantize_2[1], quantize_2[2]], e5m2[column], [quantize[1], quantize[2]], e4m3[column], bf16, fast_accum=False)
add: bf16[32, 64] = aten.add(gemm, tangents_2)
return add, gemm_1

backward of BackwardLinearAdd:
@@ -2 +2 @@
+gemm: bf16[32, 64] = te.gemm([quantize_2[0], quantize_2[2]], e5m2[row], [quantize_1[1], quantize_1[2]], e4m3[column], bf16, fast_accum=False, addend=tangents_2)
@@ -4,2 +4 @@
+return gemm, gemm_1""",
    )


def test_backward_add_rms_norm() -> None:
    assert_expected_inline(
        snapshot("fuse_backward_add_rms_norm"),
        """\
forward of MakeExtraOutput, RMSNorm, BasicLinear:
rms_norm: (bf16[32, 64], f32[32]) = te.rms_norm(input, 1.weight, 1e-05, cast_before_weight=False, zero_centered=False)
quantize: (f8e4m3[32, 64], f8e4m3[64, 32], f32[1]) = te.quantize(rms_norm[0], e4m3[row+column])
quantize_1: (f8e4m3[96, 64], f8e4m3[64, 96], f32[1]) = te.quantize(2.weight, e4m3[row+column])
gemm: bf16[32, 96] = te.gemm([quantize[0], quantize[2]], e4m3[row], [quantize_1[0], quantize_1[2]], e4m3[row], bf16, fast_accum=False)
clone: bf16[32, 64] = aten.clone(input)
view: f32[32, 1] = aten.view(rms_norm[1], [32, 1])
return gemm, clone, input, 1.weight, quantize[1], quantize[2], quantize_1[1], quantize_1[2], view

backward of MakeExtraOutput, RMSNorm, BasicLinear:
quantize_2: (f8e5m2[32, 96], f8e5m2[96, 32], f32[1]) = te.quantize(tangents_1, e5m2[row+column])
gemm: bf16[32, 64] = te.gemm([quantize_2[0], quantize_2[2]], e5m2[row], [quantize_1[1], quantize_1[2]], e4m3[column], bf16, fast_accum=False)
gemm_1: bf16[96, 64] = te.gemm([quantize_2[1], quantize_2[2]], e5m2[column], [quantize[1], quantize[2]], e4m3[column], bf16, fast_accum=False)
to: f32[32, 64] = gemm.to(f32)
to_1: f32[32, 64] = input.to(f32)
mul: f32[32, 64] = aten.mul(to_1, view)
to_2: f32[64] = 1.weight.to(f32)
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
add: bf16[32, 64] = aten.add(to_4, tangents_2)
return add, to_3, gemm_1

backward of BackwardAddRMSNorm, BasicLinear:
the same graph""",
    )


def test_layer_norm_linear() -> None:
    assert_expected_inline(
        snapshot("fuse_layer_norm_linear"),
        """\
forward of RMSNorm, BasicLinear, Bias:
rms_norm: (bf16[32, 64], f32[32]) = te.rms_norm(input, 0.weight, 1e-05, cast_before_weight=False, zero_centered=False)
quantize: (f8e4m3[32, 64], f8e4m3[64, 32], f32[1]) = te.quantize(rms_norm[0], e4m3[row+column])
quantize_1: (f8e4m3[96, 64], f8e4m3[64, 96], f32[1]) = te.quantize(1.weight, e4m3[row+column])
gemm: bf16[32, 96] = te.gemm([quantize[0], quantize[2]], e4m3[row], [quantize_1[0], quantize_1[2]], e4m3[row], bf16, fast_accum=False)
add: bf16[32, 96] = aten.add(gemm, 2.bias)
view: f32[32, 1] = aten.view(rms_norm[1], [32, 1])
return add, input, 0.weight, quantize[1], quantize[2], quantize_1[1], quantize_1[2], view

forward of LayerNormLinear:
@@ -1,2 +1 @@
+rms_norm_quantize: (f32[32], f8e4m3[32, 64], f8e4m3[64, 32], f32[1]) = te.rms_norm_quantize(input, 0.weight, 1e-05, cast_before_weight=False, zero_centered=False, quantizer=e4m3[row+column], keep_output=False)
@@ -4,4 +3,3 @@
+gemm: bf16[32, 96] = te.gemm([rms_norm_quantize[1], rms_norm_quantize[3]], e4m3[row], [quantize_1[0], quantize_1[2]], e4m3[row], bf16, fast_accum=False, bias=2.bias)
+view: f32[32, 1] = aten.view(rms_norm_quantize[0], [32, 1])
+return gemm, input, 0.weight, rms_norm_quantize[2], rms_norm_quantize[3], quantize_1[1], quantize_1[2], view

backward of RMSNorm, BasicLinear, Bias:
bias_grad: f32[96] = te.bias_grad(tangents_1)
to: bf16[96] = bias_grad.to(bf16)
quantize_2: (f8e5m2[32, 96], f8e5m2[96, 32], f32[1]) = te.quantize(tangents_1, e5m2[row+column])
gemm: bf16[32, 64] = te.gemm([quantize_2[0], quantize_2[2]], e5m2[row], [quantize_1[1], quantize_1[2]], e4m3[column], bf16, fast_accum=False)
gemm_1: bf16[96, 64] = te.gemm([quantize_2[1], quantize_2[2]], e5m2[column], [quantize[1], quantize[2]], e4m3[column], bf16, fast_accum=False)
to_1: f32[32, 64] = gemm.to(f32)
to_2: f32[32, 64] = input.to(f32)
mul: f32[32, 64] = aten.mul(to_2, view)
to_3: f32[64] = 0.weight.to(f32)
mul_1: f32[32, 64] = aten.mul(to_1, to_3)
mul_2: f32[32, 64] = aten.mul(to_1, mul)
sum: f32[64] = aten.sum(mul_2, [0])
to_4: bf16[64] = sum.to(bf16)
mul_3: f32[32, 64] = aten.mul(mul_1, mul)
mean: f32[32, 1] = aten.mean(mul_3, [-1], keepdim=True)
mul_4: f32[32, 64] = aten.mul(mul, mean)
sub: f32[32, 64] = aten.sub(mul_1, mul_4)
mul_5: f32[32, 64] = aten.mul(view, sub)
to_5: bf16[32, 64] = mul_5.to(bf16)
return to_5, to_4, gemm_1, to

backward of LayerNormLinear:
@@ -4,2 +4,2 @@
+gemm: bf16[32, 64] = te.gemm([quantize_2[0], quantize_2[2]], e5m2[row], [quantize[1], quantize[2]], e4m3[column], bf16, fast_accum=False)
+gemm_1: bf16[96, 64] = te.gemm([quantize_2[1], quantize_2[2]], e5m2[column], [rms_norm_quantize[2], rms_norm_quantize[3]], e4m3[column], bf16, fast_accum=False)""",
    )


def test_layer_norm_mlp() -> None:
    assert_expected_inline(
        snapshot("layer_norm_mlp"),
        """\
forward of RMSNorm, BasicLinear, GELU, BasicLinear:
rms_norm: (bf16[32, 64], f32[32]) = te.rms_norm(input, 0.weight, 1e-05, cast_before_weight=False, zero_centered=False)
quantize: (f8e4m3[32, 64], f8e4m3[64, 32], f32[1]) = te.quantize(rms_norm[0], e4m3[row+column])
quantize_1: (f8e4m3[96, 64], f8e4m3[64, 96], f32[1]) = te.quantize(1.weight, e4m3[row+column])
gemm: bf16[32, 96] = te.gemm([quantize[0], quantize[2]], e4m3[row], [quantize_1[0], quantize_1[2]], e4m3[row], bf16, fast_accum=False)
activation: bf16[32, 96] = te.activation(gemm, 'gelu')
quantize_2: (f8e4m3[32, 96], f8e4m3[96, 32], f32[1]) = te.quantize(activation, e4m3[row+column])
quantize_3: (f8e4m3[64, 96], f8e4m3[96, 64], f32[1]) = te.quantize(3.weight, e4m3[row+column])
gemm_1: bf16[32, 64] = te.gemm([quantize_2[0], quantize_2[2]], e4m3[row], [quantize_3[0], quantize_3[2]], e4m3[row], bf16, fast_accum=False)
view: f32[32, 1] = aten.view(rms_norm[1], [32, 1])
return gemm_1, input, 0.weight, quantize[1], quantize[2], quantize_1[1], quantize_1[2], gemm, quantize_2[1], quantize_2[2], quantize_3[1], quantize_3[2], view

forward of LayerNormMLP:
@@ -1,2 +1 @@
+rms_norm_quantize: (f32[32], f8e4m3[32, 64], f8e4m3[64, 32], f32[1]) = te.rms_norm_quantize(input, 0.weight, 1e-05, cast_before_weight=False, zero_centered=False, quantizer=e4m3[row+column], keep_output=False)
@@ -4,3 +3,2 @@
+gemm: bf16[32, 96] = te.gemm([rms_norm_quantize[1], rms_norm_quantize[3]], e4m3[row], [quantize_1[0], quantize_1[2]], e4m3[row], bf16, fast_accum=False)
+activation_quantize: (f8e4m3[32, 96], f8e4m3[96, 32], f32[1]) = te.activation_quantize(gemm, 'gelu', e4m3[row+column], keep_output=False)
@@ -8,3 +6,3 @@
+gemm_1: bf16[32, 64] = te.gemm([activation_quantize[0], activation_quantize[2]], e4m3[row], [quantize_3[0], quantize_3[2]], e4m3[row], bf16, fast_accum=False)
+view: f32[32, 1] = aten.view(rms_norm_quantize[0], [32, 1])
+return gemm_1, input, 0.weight, rms_norm_quantize[2], rms_norm_quantize[3], quantize_1[1], quantize_1[2], gemm, activation_quantize[1], activation_quantize[2], quantize_3[1], quantize_3[2], view

backward of RMSNorm, BasicLinear, GELU, BasicLinear:
quantize_4: (f8e5m2[32, 64], f8e5m2[64, 32], f32[1]) = te.quantize(tangents_1, e5m2[row+column])
gemm_1: bf16[32, 96] = te.gemm([quantize_4[0], quantize_4[2]], e5m2[row], [quantize_3[1], quantize_3[2]], e4m3[column], bf16, fast_accum=False)
activation_backward: bf16[32, 96] = te.activation_backward(gemm_1, gemm, 'gelu')
quantize_5: (f8e5m2[32, 96], f8e5m2[96, 32], f32[1]) = te.quantize(activation_backward, e5m2[row+column])
gemm_2: bf16[32, 64] = te.gemm([quantize_5[0], quantize_5[2]], e5m2[row], [quantize_1[1], quantize_1[2]], e4m3[column], bf16, fast_accum=False)
gemm_3: bf16[96, 64] = te.gemm([quantize_5[1], quantize_5[2]], e5m2[column], [quantize[1], quantize[2]], e4m3[column], bf16, fast_accum=False)
to: f32[32, 64] = gemm_2.to(f32)
to_1: f32[32, 64] = input.to(f32)
mul: f32[32, 64] = aten.mul(to_1, view)
to_2: f32[64] = 0.weight.to(f32)
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
gemm_4: bf16[64, 96] = te.gemm([quantize_4[1], quantize_4[2]], e5m2[column], [quantize_2[1], quantize_2[2]], e4m3[column], bf16, fast_accum=False)
return to_4, to_3, gemm_3, gemm_4

backward of LayerNormMLP:
@@ -2,5 +2,5 @@
+gemm_1: bf16[32, 96] = te.gemm([quantize_4[0], quantize_4[2]], e5m2[row], [quantize_1[1], quantize_1[2]], e4m3[column], bf16, fast_accum=False)
+activation_backward_quantize: (f8e5m2[32, 96], f32[1]) = te.activation_backward_quantize(gemm_1, gemm, 'gelu', e5m2[row], keep_output=False, bias_grad=False)
+gemm_2: bf16[32, 64] = te.gemm([activation_backward_quantize[0], activation_backward_quantize[1]], e5m2[row], [quantize[1], quantize[2]], e4m3[column], bf16, fast_accum=False)
+transpose: f8e5m2[96, 32] = te.transpose(activation_backward_quantize[0])
+gemm_3: bf16[96, 64] = te.gemm([transpose, activation_backward_quantize[1]], e5m2[column], [rms_norm_quantize[2], rms_norm_quantize[3]], e4m3[column], bf16, fast_accum=False)
@@ -21 +21 @@
+gemm_4: bf16[64, 96] = te.gemm([quantize_4[1], quantize_4[2]], e5m2[column], [activation_quantize[1], activation_quantize[2]], e4m3[column], bf16, fast_accum=False)""",
    )


def test_grouped_mlp() -> None:
    assert_expected_inline(
        snapshot("fuse_grouped_mlp"),
        """\
forward of GroupedLinear, GELU, GroupedLinear:
quantize: (f8e4m3[32, 64], f8e4m3[64, 32], f32[1]) = te.quantize(input, e4m3[row+column])
quantize_1: (f8e4m3[2, 96, 64], f8e4m3[2, 64, 96], f32[2]) = te.quantize(0.weight, grouped e4m3[row+column])
grouped_gemm: bf16[32, 96] = te.grouped_gemm([quantize[0], quantize[2]], e4m3[row], [quantize_1[0], quantize_1[2]], grouped e4m3[row], extra_inputs_0, bf16, fast_accum=False)
activation: bf16[32, 96] = te.activation(grouped_gemm, 'gelu')
quantize_2: (f8e4m3[32, 96], f8e4m3[96, 32], f32[1]) = te.quantize(activation, e4m3[row+column])
quantize_3: (f8e4m3[2, 64, 96], f8e4m3[2, 96, 64], f32[2]) = te.quantize(2.weight, grouped e4m3[row+column])
grouped_gemm_1: bf16[32, 64] = te.grouped_gemm([quantize_2[0], quantize_2[2]], e4m3[row], [quantize_3[0], quantize_3[2]], grouped e4m3[row], extra_inputs_1, bf16, fast_accum=False)
return grouped_gemm_1, extra_inputs_0, extra_inputs_1, quantize[1], quantize[2], quantize_1[1], quantize_1[2], grouped_gemm, quantize_2[1], quantize_2[2], quantize_3[1], quantize_3[2]

forward of GroupedMLP:
@@ -1,8 +1,2 @@
+GroupedMLP: (bf16[32, 64], f8e4m3[64, 32], f32[1], f8e4m3[2, 64, 96], f32[2], bf16[32, 96], f8e4m3[2, 96, 64], f32[2]) = te.GroupedMLP(input, [0.weight, 2.weight], [extra_inputs_0, extra_inputs_1], GroupedMLP((GroupedLinear(2, 64, 96, recipe=float8_current_scaling), GELU(), GroupedLinear(2, 96, 64, recipe=float8_current_scaling))), Call(requires_grad=[True, True, True, False, False], training=True))
+return GroupedMLP[0], extra_inputs_0, extra_inputs_1, GroupedMLP[1], GroupedMLP[2], GroupedMLP[3], GroupedMLP[4], GroupedMLP[5], GroupedMLP[6], GroupedMLP[7]

backward of GroupedLinear, GELU, GroupedLinear:
quantize_4: (f8e5m2[32, 64], f8e5m2[64, 32], f32[1]) = te.quantize(tangents_1, e5m2[row+column])
grouped_gemm_1: bf16[32, 96] = te.grouped_gemm([quantize_4[0], quantize_4[2]], e5m2[row], [quantize_3[1], quantize_3[2]], grouped e4m3[column], extra_inputs_1, bf16, fast_accum=False)
grouped_gemm_2: bf16[2, 64, 96] = te.grouped_gemm([quantize_4[1], quantize_4[2]], e5m2[column], [quantize_2[1], quantize_2[2]], e4m3[column], extra_inputs_1, bf16, fast_accum=False)
activation_backward: bf16[32, 96] = te.activation_backward(grouped_gemm_1, grouped_gemm, 'gelu')
quantize_5: (f8e5m2[32, 96], f8e5m2[96, 32], f32[1]) = te.quantize(activation_backward, e5m2[row+column])
grouped_gemm_3: bf16[32, 64] = te.grouped_gemm([quantize_5[0], quantize_5[2]], e5m2[row], [quantize_1[1], quantize_1[2]], grouped e4m3[column], extra_inputs_0, bf16, fast_accum=False)
grouped_gemm_4: bf16[2, 96, 64] = te.grouped_gemm([quantize_5[1], quantize_5[2]], e5m2[column], [quantize[1], quantize[2]], e4m3[column], extra_inputs_0, bf16, fast_accum=False)
return grouped_gemm_3, grouped_gemm_4, grouped_gemm_2, None, None

backward of GroupedMLP:
@@ -1,8 +1,2 @@
+GroupedMLP_backward: (bf16[32, 64], bf16[2, 96, 64], bf16[2, 64, 96]) = te.GroupedMLP_backward(tangents_1, [], [extra_inputs_0, GroupedMLP[1], GroupedMLP[2], GroupedMLP[3], GroupedMLP[4], GroupedMLP[5], extra_inputs_1, GroupedMLP[6], GroupedMLP[7]], [32, 64, 2, 96, 64, 2, 64, 96, 2, 2], GroupedMLP((GroupedLinear(2, 64, 96, recipe=float8_current_scaling), GELU(), GroupedLinear(2, 96, 64, recipe=float8_current_scaling))), Call(requires_grad=[True, True, True, False, False], training=True), Layout((5, 1, 3), (2, 3, 3, 1, 1), (torch.bfloat16, torch.bfloat16, torch.bfloat16, torch.int32, torch.int32)))
+return GroupedMLP_backward[0], GroupedMLP_backward[1], GroupedMLP_backward[2], None, None""",
    )
