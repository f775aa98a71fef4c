"""Every stage of LayerNorm, linear, GELU, linear with biases. 19 rows: no multiple of 16, so column copies are padded to 32."""

from __future__ import annotations

import math

import pytest
import torch
from expecttest import assert_expected_inline
from helpers.models.snapshot_models import GeluMLP, snapshot

SHAPE = (19, 64)


@pytest.fixture(scope="module")
def graphs() -> dict[str, str]:
    """{stage: text}, taken on the CPU; the rewritten graphs run as they are."""
    return snapshot(GeluMLP, SHAPE, "cpu")


def test_match(graphs: dict[str, str]) -> None:
    """Four operations of the user's became four te operations; te.linear also returns what its backward will read."""
    assert_expected_inline(
        graphs["match"],
        """\
norm.weight: bf16[64] = input
norm.bias: bf16[64] = input
x: bf16[19, 64] = input
fc1.weight: bf16[128, 64] = input
fc1.bias: bf16[128] = input
fc2.weight: bf16[64, 128] = input
fc2.bias: bf16[64] = input
layer_norm: (bf16[19, 64], f32[19], f32[19]) = te.layer_norm(x, norm.weight, norm.bias, 1e-05)
linear: (bf16[19, 128], f8e4m3[64, 32], f32[1], f8e4m3[64, 128], f32[1]) = te.linear(layer_norm[0], fc1.weight, fc1.bias, linear(x e4m3[row+column], w e4m3[row+column], dy e5m2[row+column]))
gelu: bf16[19, 128] = te.gelu(linear[0], 'none')
linear_1: (bf16[19, 64], f8e4m3[128, 32], f32[1], f8e4m3[128, 64], f32[1]) = te.linear(gelu, fc2.weight, fc2.bias, linear(x e4m3[row+column], w e4m3[row+column], dy e5m2[row+column]))
return linear_1[0]""",
    )


def test_joint(graphs: dict[str, str]) -> None:
    """Each linear in its parts, with its backward: every te.quantize makes both copies at once, the column copy for backward."""
    assert_expected_inline(
        graphs["joint"],
        """\
norm.weight: bf16[64] = input
norm.bias: bf16[64] = input
x: bf16[19, 64] = input
fc1.weight: bf16[128, 64] = input
fc1.bias: bf16[128] = input
fc2.weight: bf16[64, 128] = input
fc2.bias: bf16[64] = input
tangents_1: bf16[19, 64] = input
layer_norm: (bf16[19, 64], f32[19], f32[19]) = te.layer_norm(x, norm.weight, norm.bias, 1e-05)
quantize: (f8e4m3[19, 64], f8e4m3[64, 32], f32[1]) = te.quantize(layer_norm[0], e4m3[row+column])
quantize_1: (f8e4m3[128, 64], f8e4m3[64, 128], f32[1]) = te.quantize(fc1.weight, e4m3[row+column])
gemm: f32[19, 128] = te.gemm([quantize[0], quantize[2]], e4m3[row], [quantize_1[0], quantize_1[2]], e4m3[row], f32, fast_accum=False)
add_bias: bf16[19, 128] = te.add_bias(gemm, fc1.bias, bf16)
activation: bf16[19, 128] = te.activation(add_bias, 'gelu')
quantize_2: (f8e4m3[19, 128], f8e4m3[128, 32], f32[1]) = te.quantize(activation, e4m3[row+column])
quantize_3: (f8e4m3[64, 128], f8e4m3[128, 64], f32[1]) = te.quantize(fc2.weight, e4m3[row+column])
gemm_1: f32[19, 64] = te.gemm([quantize_2[0], quantize_2[2]], e4m3[row], [quantize_3[0], quantize_3[2]], e4m3[row], f32, fast_accum=False)
add_bias_1: bf16[19, 64] = te.add_bias(gemm_1, fc2.bias, bf16)
quantize_4: (f8e5m2[19, 64], f8e5m2[64, 32], f32[1]) = te.quantize(tangents_1, e5m2[row+column])
bias_grad: f32[64] = te.bias_grad(tangents_1)
to: bf16[64] = bias_grad.to(bf16)
gemm_2: bf16[19, 128] = te.gemm([quantize_4[0], quantize_4[2]], e5m2[row], [quantize_3[1], quantize_3[2]], e4m3[column], bf16, fast_accum=False)
gemm_3: bf16[64, 128] = te.gemm([quantize_4[1], quantize_4[2]], e5m2[column], [quantize_2[1], quantize_2[2]], e4m3[column], bf16, fast_accum=False)
activation_backward: bf16[19, 128] = te.activation_backward(gemm_2, add_bias, 'gelu')
quantize_5: (f8e5m2[19, 128], f8e5m2[128, 32], f32[1]) = te.quantize(activation_backward, e5m2[row+column])
bias_grad_1: f32[128] = te.bias_grad(activation_backward)
to_1: bf16[128] = bias_grad_1.to(bf16)
gemm_4: bf16[19, 64] = te.gemm([quantize_5[0], quantize_5[2]], e5m2[row], [quantize_1[1], quantize_1[2]], e4m3[column], bf16, fast_accum=False)
gemm_5: bf16[128, 64] = te.gemm([quantize_5[1], quantize_5[2]], e5m2[column], [quantize[1], quantize[2]], e4m3[column], bf16, fast_accum=False)
to_2: f32[19, 64] = gemm_4.to(f32)
view: f32[19, 1] = aten.view(layer_norm[2], [19, 1])
to_3: f32[19, 64] = x.to(f32)
view_1: f32[19, 1] = aten.view(layer_norm[1], [19, 1])
sub: f32[19, 64] = aten.sub(to_3, view_1)
mul: f32[19, 64] = aten.mul(sub, view)
to_4: f32[64] = norm.weight.to(f32)
mul_1: f32[19, 64] = aten.mul(to_2, to_4)
mean: f32[19, 1] = aten.mean(mul_1, [-1], keepdim=True)
sub_1: f32[19, 64] = aten.sub(mul_1, mean)
mul_2: f32[19, 64] = aten.mul(mul_1, mul)
mean_1: f32[19, 1] = aten.mean(mul_2, [-1], keepdim=True)
mul_3: f32[19, 64] = aten.mul(mul, mean_1)
sub_2: f32[19, 64] = aten.sub(sub_1, mul_3)
mul_4: f32[19, 64] = aten.mul(view, sub_2)
to_5: bf16[19, 64] = mul_4.to(bf16)
mul_5: f32[19, 64] = aten.mul(to_2, mul)
sum: f32[64] = aten.sum(mul_5, [0])
to_6: bf16[64] = sum.to(bf16)
sum_1: f32[64] = aten.sum(to_2, [0])
to_7: bf16[64] = sum_1.to(bf16)
return add_bias_1, to_6, to_7, to_5, gemm_5, to_1, gemm_3, to""",
    )


def test_forward(graphs: dict[str, str]) -> None:
    """The norm and GELU write FP8 themselves, the biases are in the GEMMs; the last results are what backward reads."""
    assert_expected_inline(
        graphs["forward"],
        """\
norm.weight: bf16[64] = input
norm.bias: bf16[64] = input
x: bf16[19, 64] = input
fc1.weight: bf16[128, 64] = input
fc1.bias: bf16[128] = input
fc2.weight: bf16[64, 128] = input
fc2.bias: bf16[64] = input
layer_norm_quantize: (f32[19], f32[19], f8e4m3[19, 64], f8e4m3[64, 32], f32[1]) = te.layer_norm_quantize(x, norm.weight, norm.bias, 1e-05, e4m3[row+column], keep_output=False)
quantize: (f8e4m3[128, 64], f8e4m3[64, 128], f32[1]) = te.quantize(fc1.weight, e4m3[row+column])
gemm: bf16[19, 128] = te.gemm([layer_norm_quantize[2], layer_norm_quantize[4]], e4m3[row], [quantize[0], quantize[2]], e4m3[row], bf16, fast_accum=False, bias=fc1.bias)
activation_quantize: (f8e4m3[19, 128], f8e4m3[128, 32], f32[1]) = te.activation_quantize(gemm, 'gelu', e4m3[row+column], keep_output=False)
quantize_1: (f8e4m3[64, 128], f8e4m3[128, 64], f32[1]) = te.quantize(fc2.weight, e4m3[row+column])
gemm_1: bf16[19, 64] = te.gemm([activation_quantize[0], activation_quantize[2]], e4m3[row], [quantize_1[0], quantize_1[2]], e4m3[row], bf16, fast_accum=False, bias=fc2.bias)
view: f32[19, 1] = aten.view(layer_norm_quantize[1], [19, 1])
view_1: f32[19, 1] = aten.view(layer_norm_quantize[0], [19, 1])
return gemm_1, norm.weight, x, layer_norm_quantize[3], layer_norm_quantize[4], quantize[1], quantize[2], gemm, activation_quantize[1], activation_quantize[2], quantize_1[1], quantize_1[2], view, view_1""",
    )


def test_backward(graphs: dict[str, str]) -> None:
    """GELU's gradient is written in FP8 with the bias gradient beside it; the norm's gradient is aten, for Inductor to fuse."""
    assert_expected_inline(
        graphs["backward"],
        """\
norm.weight: bf16[64] = input
x: bf16[19, 64] = input
layer_norm_quantize[3]: f8e4m3[64, 32] = input
layer_norm_quantize[4]: f32[1] = input
quantize[1]: f8e4m3[64, 128] = input
quantize[2]: f32[1] = input
gemm: bf16[19, 128] = input
activation_quantize[1]: f8e4m3[128, 32] = input
activation_quantize[2]: f32[1] = input
quantize_1[1]: f8e4m3[128, 64] = input
quantize_1[2]: f32[1] = input
view: f32[19, 1] = input
view_1: f32[19, 1] = input
tangents_1: bf16[19, 64] = input
quantize_bias_grad: (f32[64], f8e5m2[19, 64], f8e5m2[64, 32], f32[1]) = te.quantize_bias_grad(tangents_1, e5m2[row+column])
to: bf16[64] = quantize_bias_grad[0].to(bf16)
gemm_1: bf16[19, 128] = te.gemm([quantize_bias_grad[1], quantize_bias_grad[3]], e5m2[row], [quantize_1[1], quantize_1[2]], e4m3[column], bf16, fast_accum=False)
activation_backward_quantize: (f32[128], f8e5m2[19, 128], f32[1]) = te.activation_backward_quantize(gemm_1, gemm, 'gelu', e5m2[row], keep_output=False, bias_grad=True)
to_1: bf16[128] = activation_backward_quantize[0].to(bf16)
gemm_2: bf16[19, 64] = te.gemm([activation_backward_quantize[1], activation_backward_quantize[2]], e5m2[row], [quantize[1], quantize[2]], e4m3[column], bf16, fast_accum=False)
transpose: f8e5m2[128, 32] = te.transpose(activation_backward_quantize[1])
gemm_3: bf16[128, 64] = te.gemm([transpose, activation_backward_quantize[2]], e5m2[column], [layer_norm_quantize[3], layer_norm_quantize[4]], e4m3[column], bf16, fast_accum=False)
to_2: f32[19, 64] = gemm_2.to(f32)
to_3: f32[19, 64] = x.to(f32)
sub: f32[19, 64] = aten.sub(to_3, view_1)
mul: f32[19, 64] = aten.mul(sub, view)
to_4: f32[64] = norm.weight.to(f32)
mul_1: f32[19, 64] = aten.mul(to_2, to_4)
mean: f32[19, 1] = aten.mean(mul_1, [-1], keepdim=True)
sub_1: f32[19, 64] = aten.sub(mul_1, mean)
mul_2: f32[19, 64] = aten.mul(mul_1, mul)
mean_1: f32[19, 1] = aten.mean(mul_2, [-1], keepdim=True)
mul_3: f32[19, 64] = aten.mul(mul, mean_1)
sub_2: f32[19, 64] = aten.sub(sub_1, mul_3)
mul_4: f32[19, 64] = aten.mul(view, sub_2)
to_5: bf16[19, 64] = mul_4.to(bf16)
mul_5: f32[19, 64] = aten.mul(to_2, mul)
sum: f32[64] = aten.sum(mul_5, [0])
to_6: bf16[64] = sum.to(bf16)
sum_1: f32[64] = aten.sum(to_2, [0])
to_7: bf16[64] = sum_1.to(bf16)
gemm_4: bf16[64, 128] = te.gemm([quantize_bias_grad[2], quantize_bias_grad[3]], e5m2[column], [activation_quantize[1], activation_quantize[2]], e4m3[column], bf16, fast_accum=False)
return to_6, to_7, to_5, gemm_3, to_1, gemm_4, to""",
    )


def test_inference(graphs: dict[str, str]) -> None:
    """Row copies only, and one GEMM a linear with its bias."""
    assert_expected_inline(
        graphs["inference"],
        """\
norm.weight: bf16[64] = input
norm.bias: bf16[64] = input
x: bf16[19, 64] = input
fc1.weight: bf16[128, 64] = input
fc1.bias: bf16[128] = input
fc2.weight: bf16[64, 128] = input
fc2.bias: bf16[64] = input
layer_norm_quantize: (f32[19], f32[19], f8e4m3[19, 64], f32[1]) = te.layer_norm_quantize(x, norm.weight, norm.bias, 1e-05, e4m3[row], keep_output=False)
quantize: (f8e4m3[128, 64], f32[1]) = te.quantize(fc1.weight, e4m3[row])
gemm: bf16[19, 128] = te.gemm([layer_norm_quantize[2], layer_norm_quantize[3]], e4m3[row], [quantize[0], quantize[1]], e4m3[row], bf16, fast_accum=False, bias=fc1.bias)
activation_quantize: (f8e4m3[19, 128], f32[1]) = te.activation_quantize(gemm, 'gelu', e4m3[row], keep_output=False)
quantize_1: (f8e4m3[64, 128], f32[1]) = te.quantize(fc2.weight, e4m3[row])
gemm_1: bf16[19, 64] = te.gemm([activation_quantize[0], activation_quantize[1]], e4m3[row], [quantize_1[0], quantize_1[1]], e4m3[row], bf16, fast_accum=False, bias=fc2.bias)
return gemm_1""",
    )


def test_fake_cuda_gives_the_same_graphs(graphs: dict[str, str]) -> None:
    """What is above is also what a GPU gets: nothing but lowering asks for the device."""
    assert snapshot(GeluMLP, SHAPE, "cuda") == graphs


class QuickGeluMLP(GeluMLP):
    """CLIP's MLP."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.fc1(self.norm(x))
        return self.fc2(h * torch.sigmoid(1.702 * h))


class NewGeluMLP(GeluMLP):
    """GPT-2's MLP."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.fc1(self.norm(x))
        return self.fc2(0.5 * h * (1.0 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * torch.pow(h, 3.0)))))


class SquaredReluMLP(GeluMLP):
    """Nemotron's MLP."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(torch.square(torch.relu(self.fc1(self.norm(x)))))


@pytest.mark.one_fast_case
@pytest.mark.parametrize(
    ("model", "kind"), [(QuickGeluMLP, "quick_gelu"), (NewGeluMLP, "gelu_tanh"), (SquaredReluMLP, "relu2")]
)
def test_a_formula_is_fused_as_gelu_is(graphs: dict[str, str], model: type[GeluMLP], kind: str) -> None:
    written = snapshot(model, SHAPE, "cuda")
    for stage in ("forward", "backward"):
        assert "'gelu'" in graphs[stage] and written[stage] == graphs[stage].replace("'gelu'", f"'{kind}'")
