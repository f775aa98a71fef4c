"""Every recipe on a GPU: numbers against the quantizers' round trips written a second time, and what is launched."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
import torch
from helpers.models.recipe_cases import BY_RECIPE, DEFAULTS, RECIPES, WIDTH, assert_close, build, run, te, tokens
from helpers.oracles.fp8_oracle import relative_error
from helpers.oracles.quantized_oracle import quantized_linears

import te_dynamo
from te_dynamo.recipe import NVFP4BlockScaling, Recipe

pytestmark = pytest.mark.gpu

SUMS = 2e-3
"""A GEMM of FP8 operands: the tensor core keeps fewer bits than fp32 of a sum."""
SAME = {"gelu_mlp": 1e-2, "swiglu": 1e-2, "block": 5e-2}
"""A model: that pushes a few values over an edge of the next quantization; behind a softmax their share grows."""


def on_gpu(dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    return {"dtype": dtype, "device": "cuda"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", RECIPES)
def test_a_linear_equals_its_recipe_written_a_second_time(name: str, dtype: torch.dtype) -> None:
    model, x = build("linear", **on_gpu(dtype)), tokens(**on_gpu(dtype))
    actual = run(te(model, RECIPES[name]), model, x)
    with quantized_linears(RECIPES[name]):
        expected = run(model, model, x)
    assert_close(actual, expected, SUMS + torch.finfo(dtype).eps)


@pytest.mark.parametrize("codegen", ["eager", "inductor"])
@pytest.mark.parametrize("model_name", ["gelu_mlp", "swiglu", "block"])
@BY_RECIPE
def test_a_model_equals_its_recipe_written_a_second_time(recipe: Recipe, model_name: str, codegen: str) -> None:
    model, x = build(model_name, **on_gpu(torch.float32)), tokens(**on_gpu(torch.float32))
    actual = run(te(model, recipe, codegen=codegen), model, x)
    with quantized_linears(recipe):
        assert_close(actual, run(model, model, x), SAME[model_name])


@BY_RECIPE
def test_the_cpus_reference_gives_the_same_numbers(recipe: Recipe) -> None:
    there, here = build("linear", **on_gpu()), build("linear", torch.bfloat16)
    on_cpu = run(te(here, recipe), here, tokens(dtype=torch.bfloat16))
    on_cuda = {name: value.cpu() for name, value in run(te(there, recipe), there, tokens(**on_gpu())).items()}
    assert_close({k: v for k, v in on_cuda.items() if k == "y"}, {"y": on_cpu["y"]}, SUMS + 0.01)


@pytest.mark.parametrize("rows", [1, 2, 15, 17, 129])
@BY_RECIPE
def test_any_number_of_rows(recipe: Recipe, rows: int) -> None:
    model, x = build("linear", **on_gpu()), torch.randn(rows, WIDTH, device="cuda", dtype=torch.bfloat16)
    actual = run(te(model, recipe), model, x)
    with quantized_linears(recipe):
        assert_close(actual, run(model, model, x), SUMS + torch.finfo(torch.bfloat16).eps)


@BY_RECIPE
def test_fusions_change_no_bit(recipe: Recipe) -> None:
    model, x = build("gelu_mlp", **on_gpu()), tokens(**on_gpu())
    fused, unfused = run(te(model, recipe), model, x), run(te(model, recipe, fusions=False), model, x)
    exact = {name: value for name, value in unfused.items() if not name.endswith("bias")}
    assert_close(fused, exact, 0.0)  # a fused bias gradient is summed tile by tile


@pytest.mark.parametrize("recipe", [*DEFAULTS, NVFP4BlockScaling()], ids=Recipe.describe)
def test_lengths_compile_once(recipe: Recipe) -> None:
    model = build("gelu_mlp", **on_gpu())
    compiled = te(model, recipe, dynamic=True, codegen="inductor")
    torch._dynamo.utils.counters.clear()
    for rows in (65, 75, 301):
        actual = run(compiled, model, tokens(rows, **on_gpu()))
        with quantized_linears(recipe):
            expected = run(model, model, tokens(rows, **on_gpu()))
        stochastic = getattr(recipe, "stochastic_rounding", False)
        assert_close(actual, expected, 0.5 if stochastic else 0.05)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


KERNELS = {
    "float8_rowwise": ("quantize_rows_kernel", "gemm_kernel"),
    "float8_block_scaling": ("quantize_block_kernel", "gemm_kernel"),
    "mxfp8": ("quantize_mxfp8_kernel", "dequantize_mxfp8_kernel"),
    "mxfp8(scale_block=128)": ("quantize_block_kernel", "gemm_kernel"),
    "nvfp4(stochastic_rounding=False)": ("quantize_nvfp4_kernel", "dequantize_nvfp4_kernel"),
}


@pytest.mark.parametrize("recipe", DEFAULTS[1:], ids=Recipe.describe)
def test_inductors_code_launches_kernels_without_a_dispatcher_call(recipe: Recipe) -> None:
    from torch._inductor.utils import run_and_get_code

    model, x = build("gelu_mlp", **on_gpu()), tokens(**on_gpu())
    with torch._inductor.config.patch(force_disable_caches=True):
        _, codes = run_and_get_code(run, te(model, recipe, codegen="inductor"), model, x)
    source = "\n".join(codes)
    assert "torch.ops.te" not in source
    for kernel in KERNELS[recipe.describe()]:
        assert re.search(rf"{kernel}_\d+\.run\(", source), kernel


@BY_RECIPE
def test_every_operation_is_lowered(recipe: Recipe) -> None:
    explanation = te_dynamo.explain(
        build("block", **on_gpu()), tokens(**on_gpu()), options={"recipe": recipe, "codegen": "inductor"}
    )
    assert explanation.coverage == 1.0
    lowered = explanation.to_dict()["lowered"]
    assert lowered and all("reference" not in row["runs"] for row in lowered)


@pytest.mark.parametrize("mode", ["reduce-overhead", "default"])
def test_every_step_rounds_by_other_bits(mode: str) -> None:
    """Also where a CUDA graph replays the drawing of them."""
    model, x = build("linear", **on_gpu()), tokens(**on_gpu())
    torch._dynamo.reset()
    options = {"recipe": "nvfp4", **torch._inductor.list_mode_options(mode)}
    compiled = torch.compile(model, backend="te", options=options)
    gradients = []
    for _ in range(5):
        model.zero_grad()
        y = compiled(x)
        y.backward(torch.ones_like(y).cumsum(-1))
        gradients.append(model.weight.grad.clone())
    assert not any(torch.equal(a, b) for a, b in itertools.pairwise(gradients))
    assert relative_error(gradients[-1], gradients[0]) < 0.2
