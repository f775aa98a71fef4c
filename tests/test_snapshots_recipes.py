"""One MLP (LayerNorm, linear, GELU, linear, with biases) in each recipe: its fused graphs, and the launches in their place."""

from __future__ import annotations

import pytest
from expecttest import assert_expected_inline
from snapshot_models import GeluMLP, capture_training, kernels_everywhere, launches

from te_dynamo.recipe import MXFP8BlockScaling, Recipe

SHAPE = (32, 64)


def te_lines(text: str) -> str:
    """The statements of our operations, and what is returned to be saved."""
    return "\n".join(line for line in text.splitlines() if "= te." in line or line.startswith("return"))


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
    assert_expected_inline(found["forward"], """""")
    assert_expected_inline(found["backward"], """""")


def test_mxfp8() -> None:
    """Columns are not transposed: the GEMMs are told which operand is read that way."""
    found = graphs("mxfp8")
    assert_expected_inline(found["forward"], """""")
    assert_expected_inline(found["backward"], """""")


def test_mxfp8_with_one_scale_for_128_values() -> None:
    """te.gemm_block multiplies it, the columns being transposed."""
    found = graphs(MXFP8BlockScaling(scale_block=128))
    assert_expected_inline(found["forward"], """""")
    assert_expected_inline(found["backward"], """""")


def test_nvfp4() -> None:
    """Three tensors an operand; gradients are rounded at random."""
    found = graphs("nvfp4")
    assert_expected_inline(found["forward"], """""")
    assert_expected_inline(found["backward"], """""")


def test_high_precision_backward() -> None:
    """Rows only in forward; backward reads x and weight, and has no operation of ours but the bias gradient."""
    found = graphs(MXFP8BlockScaling(backward="high_precision"))
    assert_expected_inline(found["forward"], """""")
    assert_expected_inline(found["backward"], """""")
