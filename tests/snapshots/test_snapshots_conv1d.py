"""Every stage of a LayerNorm, GPT-2's Conv1D, GELU, Conv1D: torch.addmm by weights that are stored as [K, N]."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from helpers.models.snapshot_models import FFN, HIDDEN, capture_training, kernels_everywhere, launches, snapshot
from torch import Tensor, nn
from torch.nn import functional as F

SHAPE = (19, HIDDEN)


class Conv1DMLP(nn.Module):
    """GPT-2's MLP as transformers writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.fc = nn.Parameter(torch.randn(HIDDEN, FFN))
        self.fc_bias = nn.Parameter(torch.randn(FFN))
        self.proj = nn.Parameter(torch.randn(FFN, HIDDEN))
        self.proj_bias = nn.Parameter(torch.randn(HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(torch.addmm(self.fc_bias, self.norm(x), self.fc), approximate="tanh")
        return torch.addmm(self.proj_bias, h, self.proj)


@pytest.fixture(scope="module")
def graphs() -> dict[str, str]:
    """{stage: text}, taken on the CPU; the rewritten graphs run as they are."""
    return snapshot(Conv1DMLP, SHAPE, "cpu")


def test_match(graphs: dict[str, str]) -> None:
    """What te.linear saves of the weight is its rowwise data, [K, N]: what dgrad contracts."""
    assert_expected_inline(
        graphs["match"],
        """\
fc_bias: bf16[128] = input
norm.weight: bf16[64] = input
norm.bias: bf16[64] = input
x: bf16[19, 64] = input
fc: bf16[64, 128] = input
proj_bias: bf16[64] = input
proj: bf16[128, 64] = input
layer_norm: (bf16[19, 64], f32[19], f32[19]) = te.layer_norm(x, norm.weight, norm.bias, 1e-05)
linear: (bf16[19, 128], f8e4m3[64, 32], f32[1], f8e4m3[64, 128], f32[1]) = te.linear(layer_norm[0], fc, fc_bias, linear(x e4m3[row+column], w e4m3[row+column], dy e5m2[row+column]) of [K, N])
gelu: bf16[19, 128] = te.gelu(linear[0], 'tanh')
linear_1: (bf16[19, 64], f8e4m3[128, 32], f32[1], f8e4m3[128, 64], f32[1]) = te.linear(gelu, proj, proj_bias, linear(x e4m3[row+column], w e4m3[row+column], dy e5m2[row+column]) of [K, N])
return linear_1[0]""",
    )


def test_forward(graphs: dict[str, str]) -> None:
    """No weight is transposed; the GEMMs read its columnwise data, the second result of te.quantize."""
    assert_expected_inline(
        graphs["forward"],
        """\
fc_bias: bf16[128] = input
norm.weight: bf16[64] = input
norm.bias: bf16[64] = input
x: bf16[19, 64] = input
fc: bf16[64, 128] = input
proj_bias: bf16[64] = input
proj: bf16[128, 64] = input
layer_norm_quantize: (f32[19], f32[19], f8e4m3[19, 64], f8e4m3[64, 32], f32[1]) = te.layer_norm_quantize(x, norm.weight, norm.bias, 1e-05, e4m3[row+column], keep_output=False)
quantize: (f8e4m3[64, 128], f8e4m3[128, 64], f32[1]) = te.quantize(fc, e4m3[row+column])
gemm: bf16[19, 128] = te.gemm([layer_norm_quantize[2], layer_norm_quantize[4]], e4m3[row], [quantize[1], quantize[2]], e4m3[column], bf16, fast_accum=False, bias=fc_bias)
activation_quantize: (f8e4m3[19, 128], f8e4m3[128, 32], f32[1]) = te.activation_quantize(gemm, 'gelu_tanh', e4m3[row+column], keep_output=False)
quantize_1: (f8e4m3[128, 64], f8e4m3[64, 128], f32[1]) = te.quantize(proj, e4m3[row+column])
gemm_1: bf16[19, 64] = te.gemm([activation_quantize[0], activation_quantize[2]], e4m3[row], [quantize_1[1], quantize_1[2]], e4m3[column], bf16, fast_accum=False, bias=proj_bias)
view: f32[19, 1] = aten.view(layer_norm_quantize[1], [19, 1])
view_1: f32[19, 1] = aten.view(layer_norm_quantize[0], [19, 1])
return gemm_1, norm.weight, x, layer_norm_quantize[3], layer_norm_quantize[4], quantize[0], quantize[2], gemm, activation_quantize[1], activation_quantize[2], quantize_1[0], quantize_1[2], view, view_1""",
    )


def test_backward(graphs: dict[str, str]) -> None:
    """x comes first in each wgrad, so that the gradient is [K, N]; nothing is transposed."""
    assert_expected_inline(
        graphs["backward"],
        """\
norm.weight: bf16[64] = input
x: bf16[19, 64] = input
layer_norm_quantize[3]: f8e4m3[64, 32] = input
layer_norm_quantize[4]: f32[1] = input
quantize[0]: f8e4m3[64, 128] = input
quantize[2]: f32[1] = input
gemm: bf16[19, 128] = input
activation_quantize[1]: f8e4m3[128, 32] = input
activation_quantize[2]: f32[1] = input
quantize_1[0]: f8e4m3[128, 64] = input
quantize_1[2]: f32[1] = input
view: f32[19, 1] = input
view_1: f32[19, 1] = input
tangents_1: bf16[19, 64] = input
quantize_bias_grad: (f32[64], f8e5m2[19, 64], f8e5m2[64, 32], f32[1]) = te.quantize_bias_grad(tangents_1, e5m2[row+column])
to: bf16[64] = quantize_bias_grad[0].to(bf16)
gemm_1: bf16[19, 128] = te.gemm([quantize_bias_grad[1], quantize_bias_grad[3]], e5m2[row], [quantize_1[0], quantize_1[2]], e4m3[row], bf16, fast_accum=False)
activation_backward_quantize: (f32[128], f8e5m2[19, 128], f32[1]) = te.activation_backward_quantize(gemm_1, gemm, 'gelu_tanh', e5m2[row], keep_output=False, bias_grad=True)
to_1: bf16[128] = activation_backward_quantize[0].to(bf16)
gemm_2: bf16[19, 64] = te.gemm([activation_backward_quantize[1], activation_backward_quantize[2]], e5m2[row], [quantize[0], quantize[2]], e4m3[row], bf16, fast_accum=False)
transpose: f8e5m2[128, 32] = te.transpose(activation_backward_quantize[1])
gemm_3: bf16[64, 128] = te.gemm([layer_norm_quantize[3], layer_norm_quantize[4]], e4m3[column], [transpose, activation_backward_quantize[2]], e5m2[column], bf16, fast_accum=False)
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
gemm_4: bf16[128, 64] = te.gemm([activation_quantize[1], activation_quantize[2]], e4m3[column], [quantize_bias_grad[2], quantize_bias_grad[3]], e5m2[column], bf16, fast_accum=False)
return to_1, to_6, to_7, to_5, gemm_3, to, gemm_4""",
    )


def test_inference(graphs: dict[str, str]) -> None:
    """Of a weight the columnwise data alone."""
    assert_expected_inline(
        graphs["inference"],
        """\
fc_bias: bf16[128] = input
norm.weight: bf16[64] = input
norm.bias: bf16[64] = input
x: bf16[19, 64] = input
fc: bf16[64, 128] = input
proj_bias: bf16[64] = input
proj: bf16[128, 64] = input
layer_norm_quantize: (f32[19], f32[19], f8e4m3[19, 64], f32[1]) = te.layer_norm_quantize(x, norm.weight, norm.bias, 1e-05, e4m3[row], keep_output=False)
quantize: (f8e4m3[128, 64], f32[1]) = te.quantize(fc, e4m3[column])
gemm: bf16[19, 128] = te.gemm([layer_norm_quantize[2], layer_norm_quantize[3]], e4m3[row], [quantize[0], quantize[1]], e4m3[column], bf16, fast_accum=False, bias=fc_bias)
activation_quantize: (f8e4m3[19, 128], f32[1]) = te.activation_quantize(gemm, 'gelu_tanh', e4m3[row], keep_output=False)
quantize_1: (f8e4m3[64, 128], f32[1]) = te.quantize(proj, e4m3[column])
gemm_1: bf16[19, 64] = te.gemm([activation_quantize[0], activation_quantize[1]], e4m3[row], [quantize_1[0], quantize_1[1]], e4m3[column], bf16, fast_accum=False, bias=proj_bias)
return gemm_1""",
    )


def test_fake_cuda_gives_the_same_graphs(graphs: dict[str, str]) -> None:
    assert snapshot(Conv1DMLP, SHAPE, "cuda") == graphs


@pytest.mark.slow
def test_launches() -> None:
    with kernels_everywhere():
        lowered = capture_training(Conv1DMLP, SHAPE, "cuda", codegen="inductor")
    assert_expected_inline(
        launches(lowered["lower.forward"]),
        """\
norm_rows_kernel -> mean, rstd, partials
norm_cast_kernel -> data, transpose, scale_inv
quantize_amaxes_kernel -> partials
quantize_cast_kernel -> data, transpose, scale_inv
gemm_kernel -> c
produce_amax_kernel -> partials
produce_write_kernel -> data, transpose, scale_inv
quantize_cast_kernel -> data, transpose, scale_inv
gemm_kernel -> c""",
    )
    assert_expected_inline(
        launches(lowered["lower.backward"]),
        """\
quantize_amax_kernel -> partials, sums
quantize_cast_kernel -> data, transpose, scale_inv
gemm_kernel -> c
produce_amax_kernel -> partials, sums
produce_write_kernel -> dbias, data, scale_inv
gemm_kernel -> c
transpose_kernel -> transpose
gemm_kernel -> c
gemm_kernel -> c""",
    )
