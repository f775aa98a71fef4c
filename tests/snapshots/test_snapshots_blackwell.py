"""One linear in the formats of Blackwell's tensor cores, on a fake B200 and a fake RTX 5090: its graphs, and the launches in their place."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from helpers.models.snapshot_models import kernels_everywhere, launches
from torch import nn

from te_dynamo.recipe import MXFP8BlockScaling, NVFP4BlockScaling, Recipe
from te_dynamo.testing import capture_on_fake_cuda

ROWS, WIDTH = 8192, 4096
RECIPES = [MXFP8BlockScaling(), MXFP8BlockScaling(scale_block=128), NVFP4BlockScaling()]


def captured(recipe: Recipe, device: str = "b200") -> tuple[list[str], dict[str, str]]:
    """(the te operations of forward and backward, {stage: what is in their place})."""
    torch._dynamo.reset()
    with kernels_everywhere():
        graphs = capture_on_fake_cuda(
            lambda: nn.Linear(WIDTH, WIDTH, bias=False).bfloat16(),
            lambda device: (torch.empty(ROWS, WIDTH, dtype=torch.bfloat16, device=device, requires_grad=True),),
            device=device,
            options={"recipe": recipe},
        )
    operations = [line for stage in ("forward", "backward") for line in graphs[stage].splitlines() if "= te." in line]
    return operations, {stage: graphs[f"lower.{stage}"] for stage in ("forward", "backward")}


def test_mxfp8() -> None:
    """Both usages of an operand have swizzled scales, which the products of both graphs read as they are."""
    operations, lowered = captured(MXFP8BlockScaling())
    assert_expected_inline(
        "\n".join(operations),
        """\
quantize: (f8e4m3[8192, 4096], u8[2048, 128, 4]) = te.quantize(args_0, mxfp8[row, swizzled])
quantize_1: (f8e4m3[4096, 4096], u8[1024, 128, 4]) = te.quantize(weight, mxfp8[row, swizzled])
gemm: bf16[8192, 4096] = te.gemm([quantize[0], quantize[1]], mxfp8[row, swizzled], [quantize_1[0], quantize_1[1]], mxfp8[row, swizzled], bf16, fast_accum=False)
quantize: (f8e4m3[8192, 4096], u8[1024, 256, 4]) = te.quantize(args_0, mxfp8[column, swizzled])
quantize_1: (f8e4m3[8192, 4096], u8[2048, 128, 4], f8e4m3[8192, 4096], u8[1024, 256, 4]) = te.quantize(tangents_1, mxfp8[row+column, swizzled])
gemm: bf16[4096, 4096] = te.gemm([quantize_1[2], quantize_1[3]], mxfp8[column, swizzled], [quantize[0], quantize[1]], mxfp8[column, swizzled], bf16, fast_accum=False)
quantize_2: (f8e4m3[4096, 4096], u8[1024, 128, 4]) = te.quantize(weight, mxfp8[column, swizzled])
gemm_1: bf16[8192, 4096] = te.gemm([quantize_1[0], quantize_1[1]], mxfp8[row, swizzled], [quantize_2[0], quantize_2[1]], mxfp8[column, swizzled], bf16, fast_accum=False)""",
    )
    assert_expected_inline(
        launches(lowered["forward"]),
        """\
quantize_mxfp8_kernel -> data, scale_inv
quantize_mxfp8_kernel -> data, scale_inv
gemm_block_scales_kernel -> c""",
    )
    assert_expected_inline(
        launches(lowered["backward"]),
        """\
quantize_mxfp8_kernel -> columnwise_data, columnwise_scale_inv
quantize_mxfp8_kernel -> data, scale_inv, columnwise_data, columnwise_scale_inv
gemm_block_scales_kernel -> c
quantize_mxfp8_kernel -> columnwise_data, columnwise_scale_inv
gemm_block_scales_kernel -> c""",
    )


def test_nvfp4() -> None:
    operations, lowered = captured(NVFP4BlockScaling())
    assert_expected_inline(
        "\n".join(operations),
        """\
quantize: (u8[8192, 2048], u8[2048, 256, 4], f32[1]) = te.quantize(args_0, nvfp4[row, hadamard, swizzled])
quantize_1: (u8[4096, 2048], u8[1024, 256, 4], f32[1]) = te.quantize(weight, nvfp4[row, 16x16, swizzled])
gemm: bf16[8192, 4096] = te.gemm([quantize[0], quantize[1], quantize[2]], nvfp4[row, hadamard, swizzled], [quantize_1[0], quantize_1[1], quantize_1[2]], nvfp4[row, 16x16, swizzled], bf16, fast_accum=False)
quantize: (u8[8192, 2048], u8[2048, 256, 4], f32[1], u8[4096, 4096], u8[1024, 512, 4], f32[1]) = te.quantize(tangents_1, nvfp4[row+column, hadamard, stochastic, swizzled], randint)
quantize_1: (u8[4096, 4096], u8[1024, 512, 4], f32[1]) = te.quantize(args_0, nvfp4[column, hadamard, swizzled])
gemm: bf16[4096, 4096] = te.gemm([quantize[3], quantize[4], quantize[5]], nvfp4[column, hadamard, stochastic, swizzled], [quantize_1[0], quantize_1[1], quantize_1[2]], nvfp4[column, hadamard, swizzled], bf16, fast_accum=False)
quantize_2: (u8[4096, 2048], u8[1024, 256, 4], f32[1]) = te.quantize(weight, nvfp4[column, 16x16, swizzled])
gemm_1: bf16[8192, 4096] = te.gemm([quantize[0], quantize[1], quantize[2]], nvfp4[row, hadamard, stochastic, swizzled], [quantize_2[0], quantize_2[1], quantize_2[2]], nvfp4[column, 16x16, swizzled], bf16, fast_accum=False)""",
    )
    assert_expected_inline(
        launches(lowered["forward"]),
        """\
quantize_amax_kernel -> partials
quantize_nvfp4_kernel -> data, scale_inv, amax
quantize_amax_kernel -> partials
quantize_nvfp4_kernel -> data, scale_inv, amax
gemm_block_scales_kernel -> c""",
    )
    assert_expected_inline(
        launches(lowered["backward"]),
        """\
hadamard_amax_kernel -> partials, columnwise_partials
quantize_nvfp4_kernel -> data, scale_inv, amax, columnwise_data, columnwise_scale_inv, columnwise_amax
hadamard_amax_kernel -> columnwise_partials
quantize_nvfp4_kernel -> columnwise_data, columnwise_scale_inv, columnwise_amax
gemm_block_scales_kernel -> c
quantize_amax_kernel -> partials
quantize_nvfp4_kernel -> columnwise_data, columnwise_scale_inv, columnwise_amax
gemm_block_scales_kernel -> c""",
    )


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES, ids=Recipe.describe)
def test_nothing_turns_scales_into_another_order(recipe: Recipe) -> None:
    _, lowered = captured(recipe)
    for text in lowered.values():
        moved = [
            line for line in text.splitlines() if ": u8[" in line and "empty" not in line and " = triton." not in line
        ]
        assert not [line for line in moved if "= input" not in line and not line.startswith("return")]
        assert "gemm_block_scales_kernel" in text and "dequantize" not in text


@pytest.mark.slow
def test_consumer_gpus_multiply_what_lies_by_rows() -> None:
    """The products of backward read the weight, and x, by columns: emulated in MXFP8. NVFP4 holds columns as rows."""
    _, lowered = captured(MXFP8BlockScaling(), "rtx5090")
    assert "gemm_block_scales_kernel" in lowered["forward"] and "gemm_block_scales_kernel" not in lowered["backward"]
    for recipe in RECIPES[1:]:
        _, lowered = captured(recipe, "rtx5090")
        assert all("gemm_block_scales_kernel" in text for text in lowered.values())
