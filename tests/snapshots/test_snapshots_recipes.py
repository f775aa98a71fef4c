"""One MLP (LayerNorm, linear, GELU, linear, with biases) in each recipe: its fused graphs, and the launches in their place."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from helpers.models.snapshot_models import HIDDEN, GeluMLP, capture_training, kernels_everywhere, launches

from te_dynamo.recipe import MXFP8BlockScaling, Recipe
from te_dynamo.testing import capture_on_fake_cuda

SHAPE = (32, 64)


def te_lines(text: str) -> str:
    """The statements of our operations, and which of their results are returned."""
    *statements, returned = text.splitlines()
    ours = [line for line in statements if "= te." in line]
    names = {line.split(":")[0] for line in ours}
    results = [result for result in returned.removeprefix("return ").split(", ") if result.split("[")[0] in names]
    return "\n".join([*ours, f"return {', '.join(results)}"])


def graphs(recipe: str | Recipe) -> dict[str, str]:
    """The te operations of the fused forward and backward, on fake CUDA."""
    captured = capture_training(GeluMLP, SHAPE, "cuda", recipe=recipe)
    return {stage: te_lines(captured[stage]) for stage in ("forward", "backward")}


def lowered(recipe: str | Recipe) -> dict[str, str]:
    """The Triton launches of forward and backward, on fake CUDA."""
    with kernels_everywhere():
        captured = capture_training(GeluMLP, SHAPE, "cuda", recipe=recipe, codegen="inductor")
        return {stage: launches(captured[f"lower.{stage}"]) for stage in ("forward", "backward")}


def test_block_scaling() -> None:
    """Activations and gradients in 1x128 blocks, weights in 128x128; both usages with scales of their own."""
    found = graphs("float8_block_scaling")
    assert_expected_inline(
        found["forward"],
        """\
layer_norm_quantize: (f32[32], f32[32], f8e4m3[32, 64], f32[1, 32], f8e4m3[64, 32], f32[1, 64]) = te.layer_norm_quantize(x, norm.weight, norm.bias, 1e-05, e4m3 1x128[row+column], keep_output=False)
quantize: (f8e4m3[128, 64], f32[1, 4], f8e4m3[64, 128], f32[1, 4]) = te.quantize(fc1.weight, e4m3 128x128[row+column])
gemm: bf16[32, 128] = te.gemm([layer_norm_quantize[2], layer_norm_quantize[3]], e4m3 1x128[row], [quantize[0], quantize[1]], e4m3 128x128[row], bf16, fast_accum=False, bias=fc1.bias)
activation_quantize: (f8e4m3[32, 128], f32[1, 32], f8e4m3[128, 32], f32[1, 128]) = te.activation_quantize(gemm, 'gelu', e4m3 1x128[row+column], keep_output=False)
quantize_1: (f8e4m3[64, 128], f32[1, 4], f8e4m3[128, 64], f32[1, 4]) = te.quantize(fc2.weight, e4m3 128x128[row+column])
gemm_1: bf16[32, 64] = te.gemm([activation_quantize[0], activation_quantize[1]], e4m3 1x128[row], [quantize_1[0], quantize_1[1]], e4m3 128x128[row], bf16, fast_accum=False, bias=fc2.bias)
return gemm_1, layer_norm_quantize[4], layer_norm_quantize[5], quantize[2], quantize[3], gemm, activation_quantize[2], activation_quantize[3], quantize_1[2], quantize_1[3]""",
    )
    assert_expected_inline(
        found["backward"],
        """\
bias_grad: f32[64] = te.bias_grad(tangents_1)
quantize_2: (f8e4m3[32, 64], f32[1, 32], f8e4m3[64, 32], f32[1, 64]) = te.quantize(tangents_1, e4m3 1x128[row+column])
gemm_1: bf16[32, 128] = te.gemm([quantize_2[0], quantize_2[1]], e4m3 1x128[row], [quantize_1[2], quantize_1[3]], e4m3 128x128[column], bf16, fast_accum=False)
activation_backward_quantize: (f32[128], f8e4m3[32, 128], f32[1, 32], f8e4m3[128, 32], f32[1, 128]) = te.activation_backward_quantize(gemm_1, gemm, 'gelu', e4m3 1x128[row+column], keep_output=False, bias_grad=True)
gemm_2: bf16[32, 64] = te.gemm([activation_backward_quantize[1], activation_backward_quantize[2]], e4m3 1x128[row], [quantize[2], quantize[3]], e4m3 128x128[column], bf16, fast_accum=False)
gemm_3: bf16[128, 64] = te.gemm([activation_backward_quantize[3], activation_backward_quantize[4]], e4m3 1x128[column], [layer_norm_quantize[4], layer_norm_quantize[5]], e4m3 1x128[column], bf16, fast_accum=False)
gemm_4: bf16[64, 128] = te.gemm([quantize_2[2], quantize_2[3]], e4m3 1x128[column], [activation_quantize[2], activation_quantize[3]], e4m3 1x128[column], bf16, fast_accum=False)
return gemm_3, gemm_4""",
    )


def test_mxfp8() -> None:
    """Columns are not transposed: the GEMMs are told which operand is read that way."""
    found = graphs("mxfp8")
    assert_expected_inline(
        found["forward"],
        """\
layer_norm_quantize: (f32[32], f32[32], f8e4m3[32, 64], u8[128, 4], f8e4m3[32, 64], u8[4, 128]) = te.layer_norm_quantize(x, norm.weight, norm.bias, 1e-05, mxfp8[row+column], keep_output=False)
quantize: (f8e4m3[128, 64], u8[128, 4], f8e4m3[128, 64], u8[4, 128]) = te.quantize(fc1.weight, mxfp8[row+column])
gemm: bf16[32, 128] = te.gemm([layer_norm_quantize[2], layer_norm_quantize[3]], mxfp8[row], [quantize[0], quantize[1]], mxfp8[row], bf16, fast_accum=False, bias=fc1.bias)
activation_quantize: (f8e4m3[32, 128], u8[128, 4], f8e4m3[32, 128], u8[4, 128]) = te.activation_quantize(gemm, 'gelu', mxfp8[row+column], keep_output=False)
quantize_1: (f8e4m3[64, 128], u8[128, 4], f8e4m3[64, 128], u8[4, 128]) = te.quantize(fc2.weight, mxfp8[row+column])
gemm_1: bf16[32, 64] = te.gemm([activation_quantize[0], activation_quantize[1]], mxfp8[row], [quantize_1[0], quantize_1[1]], mxfp8[row], bf16, fast_accum=False, bias=fc2.bias)
return gemm_1, layer_norm_quantize[4], layer_norm_quantize[5], quantize[2], quantize[3], gemm, activation_quantize[2], activation_quantize[3], quantize_1[2], quantize_1[3]""",
    )
    assert_expected_inline(
        found["backward"],
        """\
bias_grad: f32[64] = te.bias_grad(tangents_1)
quantize_2: (f8e4m3[32, 64], u8[128, 4], f8e4m3[32, 64], u8[4, 128]) = te.quantize(tangents_1, mxfp8[row+column])
gemm_1: bf16[32, 128] = te.gemm([quantize_2[0], quantize_2[1]], mxfp8[row], [quantize_1[2], quantize_1[3]], mxfp8[column], bf16, fast_accum=False)
activation_backward_quantize: (f32[128], f8e4m3[32, 128], u8[128, 4], f8e4m3[32, 128], u8[4, 128]) = te.activation_backward_quantize(gemm_1, gemm, 'gelu', mxfp8[row+column], keep_output=False, bias_grad=True)
gemm_2: bf16[32, 64] = te.gemm([activation_backward_quantize[1], activation_backward_quantize[2]], mxfp8[row], [quantize[2], quantize[3]], mxfp8[column], bf16, fast_accum=False)
gemm_3: bf16[128, 64] = te.gemm([activation_backward_quantize[3], activation_backward_quantize[4]], mxfp8[column], [layer_norm_quantize[4], layer_norm_quantize[5]], mxfp8[column], bf16, fast_accum=False)
gemm_4: bf16[64, 128] = te.gemm([quantize_2[2], quantize_2[3]], mxfp8[column], [activation_quantize[2], activation_quantize[3]], mxfp8[column], bf16, fast_accum=False)
return gemm_3, gemm_4""",
    )


def test_mxfp8_with_one_scale_for_128_values() -> None:
    """te.gemm multiplies it, the columns being transposed."""
    found = graphs(MXFP8BlockScaling(scale_block=128))
    assert_expected_inline(
        found["forward"],
        """\
layer_norm_quantize: (f32[32], f32[32], f8e4m3[32, 64], u8[128, 4], f8e4m3[64, 32], u8[128, 4]) = te.layer_norm_quantize(x, norm.weight, norm.bias, 1e-05, mxfp8 1x128[row+column], keep_output=False)
quantize: (f8e4m3[128, 64], u8[128, 4], f8e4m3[64, 128], u8[128, 4]) = te.quantize(fc1.weight, mxfp8 1x128[row+column])
gemm: bf16[32, 128] = te.gemm([layer_norm_quantize[2], layer_norm_quantize[3]], mxfp8 1x128[row], [quantize[0], quantize[1]], mxfp8 1x128[row], bf16, fast_accum=False, bias=fc1.bias)
activation_quantize: (f8e4m3[32, 128], u8[128, 4], f8e4m3[128, 32], u8[128, 4]) = te.activation_quantize(gemm, 'gelu', mxfp8 1x128[row+column], keep_output=False)
quantize_1: (f8e4m3[64, 128], u8[128, 4], f8e4m3[128, 64], u8[128, 4]) = te.quantize(fc2.weight, mxfp8 1x128[row+column])
gemm_1: bf16[32, 64] = te.gemm([activation_quantize[0], activation_quantize[1]], mxfp8 1x128[row], [quantize_1[0], quantize_1[1]], mxfp8 1x128[row], bf16, fast_accum=False, bias=fc2.bias)
return gemm_1, layer_norm_quantize[4], layer_norm_quantize[5], quantize[2], quantize[3], gemm, activation_quantize[2], activation_quantize[3], quantize_1[2], quantize_1[3]""",
    )
    assert_expected_inline(
        found["backward"],
        """\
bias_grad: f32[64] = te.bias_grad(tangents_1)
quantize_2: (f8e4m3[32, 64], u8[128, 4], f8e4m3[64, 32], u8[128, 4]) = te.quantize(tangents_1, mxfp8 1x128[row+column])
gemm_1: bf16[32, 128] = te.gemm([quantize_2[0], quantize_2[1]], mxfp8 1x128[row], [quantize_1[2], quantize_1[3]], mxfp8 1x128[column], bf16, fast_accum=False)
activation_backward_quantize: (f32[128], f8e4m3[32, 128], u8[128, 4], f8e4m3[128, 32], u8[128, 4]) = te.activation_backward_quantize(gemm_1, gemm, 'gelu', mxfp8 1x128[row+column], keep_output=False, bias_grad=True)
gemm_2: bf16[32, 64] = te.gemm([activation_backward_quantize[1], activation_backward_quantize[2]], mxfp8 1x128[row], [quantize[2], quantize[3]], mxfp8 1x128[column], bf16, fast_accum=False)
gemm_3: bf16[128, 64] = te.gemm([activation_backward_quantize[3], activation_backward_quantize[4]], mxfp8 1x128[column], [layer_norm_quantize[4], layer_norm_quantize[5]], mxfp8 1x128[column], bf16, fast_accum=False)
gemm_4: bf16[64, 128] = te.gemm([quantize_2[2], quantize_2[3]], mxfp8 1x128[column], [activation_quantize[2], activation_quantize[3]], mxfp8 1x128[column], bf16, fast_accum=False)
return gemm_3, gemm_4""",
    )


def test_mxfp8_with_weights_in_square_blocks() -> None:
    """One buffer of a weight's codes: forward and dgrad read it with scales of rows and of columns."""
    found = graphs(MXFP8BlockScaling(weight_block_dims=2))
    of_weights = "\n".join(line for text in found.values() for line in text.splitlines() if "32x32" in line)
    assert_expected_inline(
        of_weights,
        """\
quantize: (f8e4m3[128, 64], u8[128, 4], u8[4, 128]) = te.quantize(fc1.weight, mxfp8[row+column, 32x32])
gemm: bf16[32, 128] = te.gemm([layer_norm_quantize[2], layer_norm_quantize[3]], mxfp8[row], [quantize[0], quantize[1]], mxfp8[row, 32x32], bf16, fast_accum=False, bias=fc1.bias)
quantize_1: (f8e4m3[64, 128], u8[128, 4], u8[4, 128]) = te.quantize(fc2.weight, mxfp8[row+column, 32x32])
gemm_1: bf16[32, 64] = te.gemm([activation_quantize[0], activation_quantize[1]], mxfp8[row], [quantize_1[0], quantize_1[1]], mxfp8[row, 32x32], bf16, fast_accum=False, bias=fc2.bias)
gemm_1: bf16[32, 128] = te.gemm([quantize_2[0], quantize_2[1]], mxfp8[row], [quantize_1[0], quantize_1[2]], mxfp8[column, 32x32], bf16, fast_accum=False)
gemm_2: bf16[32, 64] = te.gemm([activation_backward_quantize[1], activation_backward_quantize[2]], mxfp8[row], [quantize[0], quantize[2]], mxfp8[column, 32x32], bf16, fast_accum=False)""",
    )


def test_nvfp4() -> None:
    """Three tensors an operand; gradients are rounded at random."""
    found = graphs("nvfp4")
    assert_expected_inline(
        found["forward"],
        """\
quantize: (u8[32, 32], u8[128, 4], f32[1], u8[64, 16], u8[128, 4], f32[1]) = te.quantize(native_layer_norm[0], nvfp4[row+column, hadamard])
quantize_1: (u8[128, 32], u8[128, 4], f32[1], u8[64, 64], u8[128, 8], f32[1]) = te.quantize(fc1.weight, nvfp4[row+column, 16x16])
gemm: bf16[32, 128] = te.gemm([quantize[0], quantize[1], quantize[2]], nvfp4[row, hadamard], [quantize_1[0], quantize_1[1], quantize_1[2]], nvfp4[row, 16x16], bf16, fast_accum=False, bias=fc1.bias)
quantize_2: (u8[32, 64], u8[128, 8], f32[1], u8[128, 16], u8[128, 4], f32[1]) = te.quantize(gelu, nvfp4[row+column, hadamard])
quantize_3: (u8[64, 64], u8[128, 8], f32[1], u8[128, 32], u8[128, 4], f32[1]) = te.quantize(fc2.weight, nvfp4[row+column, 16x16])
gemm_1: bf16[32, 64] = te.gemm([quantize_2[0], quantize_2[1], quantize_2[2]], nvfp4[row, hadamard], [quantize_3[0], quantize_3[1], quantize_3[2]], nvfp4[row, 16x16], bf16, fast_accum=False, bias=fc2.bias)
return gemm_1, quantize[3], quantize[4], quantize[5], quantize_1[3], quantize_1[4], quantize_1[5], gemm, quantize_2[3], quantize_2[4], quantize_2[5], quantize_3[3], quantize_3[4], quantize_3[5]""",
    )
    assert_expected_inline(
        found["backward"],
        """\
quantize_4: (u8[32, 32], u8[128, 4], f32[1], u8[64, 16], u8[128, 4], f32[1]) = te.quantize(tangents_1, nvfp4[row+column, hadamard, stochastic], randint)
bias_grad: f32[64] = te.bias_grad(tangents_1)
gemm_1: bf16[32, 128] = te.gemm([quantize_4[0], quantize_4[1], quantize_4[2]], nvfp4[row, hadamard, stochastic], [quantize_3[3], quantize_3[4], quantize_3[5]], nvfp4[column, 16x16], bf16, fast_accum=False)
quantize_5: (u8[32, 64], u8[128, 8], f32[1], u8[128, 16], u8[128, 4], f32[1]) = te.quantize(gelu_backward, nvfp4[row+column, hadamard, stochastic], randint_1)
bias_grad_1: f32[128] = te.bias_grad(gelu_backward)
gemm_2: bf16[32, 64] = te.gemm([quantize_5[0], quantize_5[1], quantize_5[2]], nvfp4[row, hadamard, stochastic], [quantize_1[3], quantize_1[4], quantize_1[5]], nvfp4[column, 16x16], bf16, fast_accum=False)
gemm_3: bf16[128, 64] = te.gemm([quantize_5[3], quantize_5[4], quantize_5[5]], nvfp4[column, hadamard, stochastic], [quantize[3], quantize[4], quantize[5]], nvfp4[column, hadamard], bf16, fast_accum=False)
gemm_4: bf16[64, 128] = te.gemm([quantize_4[3], quantize_4[4], quantize_4[5]], nvfp4[column, hadamard, stochastic], [quantize_2[3], quantize_2[4], quantize_2[5]], nvfp4[column, hadamard], bf16, fast_accum=False)
return gemm_3, gemm_4""",
    )


def test_high_precision_backward() -> None:
    """Rows only in forward; backward reads x and weight, and has no operation of ours but the bias gradient."""
    found = graphs(MXFP8BlockScaling(backward="high_precision"))
    assert_expected_inline(
        found["forward"],
        """\
layer_norm_quantize: (bf16[32, 64], f32[32], f32[32], f8e4m3[32, 64], u8[128, 4]) = te.layer_norm_quantize(x, norm.weight, norm.bias, 1e-05, mxfp8[row], keep_output=True)
quantize: (f8e4m3[128, 64], u8[128, 4]) = te.quantize(fc1.weight, mxfp8[row])
gemm: bf16[32, 128] = te.gemm([layer_norm_quantize[3], layer_norm_quantize[4]], mxfp8[row], [quantize[0], quantize[1]], mxfp8[row], bf16, fast_accum=False, bias=fc1.bias)
activation_quantize: (bf16[32, 128], f8e4m3[32, 128], u8[128, 4]) = te.activation_quantize(gemm, 'gelu', mxfp8[row], keep_output=True)
quantize_1: (f8e4m3[64, 128], u8[128, 4]) = te.quantize(fc2.weight, mxfp8[row])
gemm_1: bf16[32, 64] = te.gemm([activation_quantize[1], activation_quantize[2]], mxfp8[row], [quantize_1[0], quantize_1[1]], mxfp8[row], bf16, fast_accum=False, bias=fc2.bias)
return gemm_1, layer_norm_quantize[0], gemm, activation_quantize[0]""",
    )
    assert_expected_inline(
        found["backward"],
        """\
bias_grad: f32[64] = te.bias_grad(tangents_1)
activation_backward: bf16[32, 128] = te.activation_backward(mm, gemm, 'gelu')
bias_grad_1: f32[128] = te.bias_grad(activation_backward)
return """,
    )


def test_launches_of_block_scaling() -> None:
    """One kernel a quantization, whichever usages; a bias is in the GEMM."""
    found = lowered("float8_block_scaling")
    assert_expected_inline(
        found["forward"],
        """\
norm_rows_kernel -> mean, rstd
produce_kernel -> data, scale_inv, transpose, columnwise_scale_inv
quantize_block_kernel -> data, scale_inv, transpose, columnwise_scale_inv
gemm_kernel -> c
produce_kernel -> data, scale_inv, transpose, columnwise_scale_inv
quantize_block_kernel -> data, scale_inv, transpose, columnwise_scale_inv
gemm_kernel -> c""",
    )
    assert_expected_inline(
        found["backward"],
        """\
quantize_block_kernel -> data, scale_inv, transpose, columnwise_scale_inv
gemm_kernel -> c
produce_kernel -> sums, data, scale_inv, transpose, columnwise_scale_inv
gemm_kernel -> c
gemm_kernel -> c
gemm_kernel -> c""",
    )


def test_launches_of_mxfp8_with_one_scale_for_128_values() -> None:
    """Other quantizations, the same GEMM."""
    found = lowered(MXFP8BlockScaling(scale_block=128))
    assert_expected_inline(
        found["forward"],
        """\
norm_rows_kernel -> mean, rstd
produce_kernel -> data, scale_inv, transpose, columnwise_scale_inv
quantize_block_kernel -> data, scale_inv, transpose, columnwise_scale_inv
gemm_kernel -> c
produce_kernel -> data, scale_inv, transpose, columnwise_scale_inv
quantize_block_kernel -> data, scale_inv, transpose, columnwise_scale_inv
gemm_kernel -> c""",
    )


def test_launches_of_mxfp8() -> None:
    """Emulated: the operands of each GEMM become bf16, and torch multiplies them."""
    assert_expected_inline(
        lowered("mxfp8")["forward"],
        """\
norm_rows_kernel -> mean, rstd
produce_kernel -> data, scale_inv, transpose, columnwise_scale_inv
quantize_mxfp8_kernel -> data, scale_inv, columnwise_data, columnwise_scale_inv
dequantize_mxfp8_kernel -> values
dequantize_mxfp8_kernel -> values
produce_kernel -> data, scale_inv, transpose, columnwise_scale_inv
quantize_mxfp8_kernel -> data, scale_inv, columnwise_data, columnwise_scale_inv
dequantize_mxfp8_kernel -> values
dequantize_mxfp8_kernel -> values""",
    )


def test_launches_of_nvfp4() -> None:
    """Emulated; amaxes and bias are applied to the fp32 product."""
    assert_expected_inline(
        lowered("nvfp4")["forward"],
        """\
hadamard_amax_kernel -> partials, columnwise_partials
quantize_nvfp4_kernel -> data, scale_inv, amax, columnwise_data, columnwise_scale_inv, columnwise_amax
quantize_amax_kernel -> partials
quantize_nvfp4_kernel -> data, scale_inv, amax, columnwise_data, columnwise_scale_inv, columnwise_amax
dequantize_nvfp4_kernel -> y
dequantize_nvfp4_kernel -> y
nvfp4_epilogue_kernel -> c
hadamard_amax_kernel -> partials, columnwise_partials
quantize_nvfp4_kernel -> data, scale_inv, amax, columnwise_data, columnwise_scale_inv, columnwise_amax
quantize_amax_kernel -> partials
quantize_nvfp4_kernel -> data, scale_inv, amax, columnwise_data, columnwise_scale_inv, columnwise_amax
dequantize_nvfp4_kernel -> y
dequantize_nvfp4_kernel -> y
nvfp4_epilogue_kernel -> c""",
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe", ["float8_block_scaling", "mxfp8", MXFP8BlockScaling(scale_block=128), "nvfp4"], ids=str
)
def test_a_symbolic_number_of_tokens_reaches_the_launches(recipe: str | Recipe) -> None:
    def tokens(device: str) -> tuple[torch.Tensor]:
        return (torch.empty(200, HIDDEN, dtype=torch.bfloat16, device=device, requires_grad=True),)

    with kernels_everywhere():
        options = {"recipe": recipe, "codegen": "inductor"}
        graphs = capture_on_fake_cuda(lambda: GeluMLP().bfloat16(), tokens, options=options, dynamic=True)
    for stage in ("lower.forward", "lower.backward"):
        text = graphs[stage]
        assert "s0: int = input" in text and "= te." not in text and "triton." in text
