"""Every recipe through backend "te": forward and every gradient against the same written a second time from the quantizers'
round trips (quantized_oracle.py), and the features of a training script beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.models.recipe_cases import BY_RECIPE, DEFAULTS, RECIPES, WIDTH, assert_close, build, run, te, tokens
from helpers.oracles.fp8_oracle import relative_error
from helpers.oracles.quantized_oracle import quantized_linears, rounded
from helpers.slow import EXHAUSTIVE, slow_but
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import te_dynamo
from te_dynamo import MXFP8Quantizer
from te_dynamo.recipe import (
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
)

EXACT = 1e-6
"""One linear in fp32: only the order of its sums differs."""
SAME = 5e-3
"""A model in fp32: the order of sums pushes a few values over an edge of the next quantization."""

THROUGH_INDUCTOR = [
    pytest.param(recipe, "inductor", marks=pytest.mark.slow if recipe in (DEFAULTS[0], DEFAULTS[-1]) else EXHAUSTIVE)
    for recipe in DEFAULTS
]
"""What Inductor does to a graph is the same for all: the recipe of the simplest tensors, and that of the least simple, with each change."""


def id_of(value: Recipe | str) -> str:
    return value if isinstance(value, str) else value.describe()


# ---- numbers


@pytest.mark.parametrize("name", RECIPES)
def test_a_linear_equals_its_recipe_written_a_second_time(name: str) -> None:
    """In fp32, so that nothing but the recipe rounds."""
    model = build("linear")
    actual = run(te(model, RECIPES[name]), model, tokens())
    with quantized_linears(RECIPES[name]):
        expected = run(model, model, tokens())
    assert_close(actual, expected, EXACT)
    plain = run(model, model, tokens())
    assert relative_error(plain["y"], expected["y"]) > 0.01, "nothing was rounded"


@pytest.mark.parametrize("scale_block", [32, 128])
def test_forward_and_backward_multiply_by_the_same_weight(scale_block: int) -> None:
    """A product by ones of the identity is the weight that it reads, bit for bit."""
    model = build("linear")
    x = torch.eye(WIDTH, requires_grad=True)
    y = te(model, MXFP8BlockScaling(scale_block=scale_block, weight_block_dims=2))(x) - model.bias
    y.backward(torch.eye(WIDTH, model.out_features))
    held = MXFP8Quantizer(scale_block=scale_block, block_dims=2).quantize(model.weight).dequantize()
    assert torch.equal(x.grad[: model.out_features], held)
    assert relative_error(y, held.t()) < EXACT, "a bias was added"


@pytest.mark.parametrize("dtype", slow_but(1, [torch.bfloat16, torch.float16]))
@BY_RECIPE
def test_a_linear_of_16_bits_rounds_once_more_at_its_end(recipe: Recipe, dtype: torch.dtype) -> None:
    model, x = build("linear", dtype), tokens(dtype=dtype)
    actual = run(te(model, recipe), model, x)
    with quantized_linears(recipe):
        expected = run(model, model, x)
    assert {name: value.dtype for name, value in actual.items()} == dict.fromkeys(actual, dtype)
    assert_close(actual, expected, torch.finfo(dtype).eps / 4)


@pytest.mark.one_fast_case
@pytest.mark.parametrize("model_name", slow_but(1, ["block", "gelu_mlp", "swiglu"]))
@BY_RECIPE
def test_a_model_equals_its_recipe_written_a_second_time(recipe: Recipe, model_name: str) -> None:
    model = build(model_name)
    actual = run(te(model, recipe), model, tokens(24))
    with quantized_linears(recipe):
        expected = run(model, model, tokens(24))
    assert_close(actual, expected, SAME)


@pytest.mark.parametrize(("recipe", "codegen"), THROUGH_INDUCTOR, ids=id_of)
def test_a_block_through_inductor(recipe: Recipe, codegen: str) -> None:
    model = build("block")
    actual = run(te(model, recipe, codegen=codegen), model, tokens(24))
    with quantized_linears(recipe):
        expected = run(model, model, tokens(24))
    assert_close(actual, expected, SAME)


@pytest.mark.parametrize("rows", slow_but(1, [17, 1, 129]))
@BY_RECIPE
def test_any_number_of_rows(recipe: Recipe, rows: int) -> None:
    model, x = build("linear"), torch.randn(rows, WIDTH)
    actual = run(te(model, recipe), model, x)
    with quantized_linears(recipe):
        assert_close(actual, run(model, model, x), EXACT)


@pytest.mark.one_fast_case
@BY_RECIPE
def test_fusions_change_no_bit(recipe: Recipe) -> None:
    model = build("gelu_mlp", torch.bfloat16)
    with te_dynamo.capture() as graphs:
        fused = run(te(model, recipe), model, tokens(dtype=torch.bfloat16))
    assert ("forward", "fuse_gemm_bias", 2) in graphs.reports[0].fusions
    unfused = run(te(model, recipe, fusions=False), model, tokens(dtype=torch.bfloat16))
    assert_close(fused, unfused, 0.0)


def test_rules_give_each_linear_its_own_recipe() -> None:
    model, x = build("swiglu"), tokens(24)
    rules = [("gate", MXFP8BlockScaling()), ("up", Float8BlockScaling()), ("down", None)]
    actual = run(te(model, "float8_current_scaling", rules=rules), model, x)
    recipes: dict[Tensor, Recipe | None] = {
        model.gate.weight: MXFP8BlockScaling(), model.up.weight: Float8BlockScaling(), model.down.weight: None
    }  # fmt: skip
    with quantized_linears(None, recipes):
        assert_close(actual, run(model, model, x), SAME)


# ---- what is saved and what is shared


@pytest.mark.one_fast_case
@BY_RECIPE
def test_a_shared_input_is_quantized_once(recipe: Recipe) -> None:
    """The slow ones find a recipe whose quantizers of one tensor are not equal."""
    model = build("swiglu", torch.bfloat16)
    with te_dynamo.capture() as graphs:
        run(te(model, recipe, fusions=False), model, tokens(dtype=torch.bfloat16))
    # forward: x, silu(gate) * up, three weights; backward: dy of each linear
    assert graphs["forward"].count("= te.quantize(") == 5
    assert graphs["backward"].count("= te.quantize(") == 3


@pytest.mark.parametrize("recipe", [Float8CurrentScaling, Float8BlockScaling, MXFP8BlockScaling, NVFP4BlockScaling])
def test_high_precision_backward_saves_the_tensors_themselves(recipe: Callable[..., Recipe]) -> None:
    model, x = build("linear", torch.bfloat16), tokens(dtype=torch.bfloat16)
    with te_dynamo.capture() as graphs:
        run(te(model, recipe(backward="high_precision")), model, x)
    assert "te." not in graphs["backward"].replace("te.bias_grad(", "")
    saved = [node.meta["val"] for node in graphs.graph("backward").find_nodes(op="placeholder")]
    assert {t.dtype for t in saved} == {torch.bfloat16}
    assert "row+column" not in graphs["forward"]


@BY_RECIPE
def test_inference_holds_rows_only(recipe: Recipe) -> None:
    model, x = build("swiglu"), tokens()
    with te_dynamo.capture() as graphs, torch.no_grad():
        y = te(model, recipe)(x)
    quantizations = [
        line for line in graphs["inference"].splitlines() if "= te.quantize(" in line or "_quantize(" in line
    ]
    assert len(quantizations) == 5 and not any("column" in line for line in quantizations)
    with quantized_linears(recipe), torch.no_grad():
        assert relative_error(y, model(x)) <= SAME


# ---- stochastic rounding


def test_stochastic_rounding_touches_gradients_only_and_follows_the_seed() -> None:
    model, x = build("linear"), tokens()
    exact = run(te(model, NVFP4BlockScaling(stochastic_rounding=False)), model, x)
    compiled = te(model, NVFP4BlockScaling())

    def gradients(seed: int) -> dict[str, Tensor]:
        out = compiled(inputs := x.clone().requires_grad_())
        torch.manual_seed(1)
        dy = torch.randn_like(out)
        torch.manual_seed(seed)
        weight, dx = torch.autograd.grad(out, [model.weight, inputs], dy)
        return {"y": out.detach(), "weight": weight, "x": dx}

    first, again, other = gradients(5), gradients(5), gradients(6)
    for name in first:
        assert torch.equal(first[name], again[name])
    assert torch.equal(first["y"], exact["y"])
    for name in ("weight", "x"):
        assert not torch.equal(first[name], other[name]) and not torch.equal(first[name], exact[name])


def test_stochastic_rounding_is_right_on_average() -> None:
    """The mean of many gradients comes nearer to the product of what was not rounded than round-to-nearest's does."""
    model, x = build("linear"), tokens()
    compiled = te(model, NVFP4BlockScaling(hadamard=False))
    torch.manual_seed(1)
    inputs = x.clone().requires_grad_()
    out = compiled(inputs)
    dy = torch.randn_like(out)
    with torch._functorch.config.patch(donated_buffer=False):
        samples = [torch.autograd.grad(out, inputs, dy, retain_graph=True)[0] for _ in range(64)]
    recipe = NVFP4BlockScaling(hadamard=False)
    expected = (dy.double().flatten(0, -2) @ rounded(model.weight, recipe.weight_quantizer(), True)).reshape(x.shape)
    nearest = te(model, NVFP4BlockScaling(hadamard=False, stochastic_rounding=False))(
        inputs2 := x.clone().requires_grad_()
    )
    (to_nearest,) = torch.autograd.grad(nearest, inputs2, dy)
    mean = torch.stack(samples).mean(0)
    assert relative_error(mean, expected) < 0.5 * relative_error(to_nearest, expected)
    assert relative_error(samples[0], expected) > relative_error(to_nearest, expected)


# ---- the features of a training script


@pytest.mark.one_fast_case
@pytest.mark.parametrize("recipe", slow_but(2, reversed(DEFAULTS)), ids=Recipe.describe)
def test_accumulation_over_microbatches_adds_up(recipe: Recipe) -> None:
    model = build("gelu_mlp")

    def accumulate(call: Callable[..., Any]) -> dict[str, Tensor]:
        model.zero_grad()
        for rows in (8, 16, 16):
            call(tokens(rows)).square().sum().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters()}

    actual = accumulate(te(model, recipe))
    with quantized_linears(recipe):
        assert_close(actual, accumulate(model), SAME)


@pytest.mark.one_fast_case
@pytest.mark.parametrize(
    ("recipe", "codegen"),
    [*slow_but(2, [(recipe, "eager") for recipe in (*DEFAULTS, NVFP4BlockScaling())]), *THROUGH_INDUCTOR],
    ids=id_of,
)
def test_a_sequence_of_any_length_compiles_once(recipe: Recipe, codegen: str) -> None:
    model = build("gelu_mlp")
    compiled = te(model, recipe, dynamic=True, codegen=codegen)
    torch._dynamo.utils.counters.clear()
    for rows in (
        65,
        75,
        130,
    ):  # more than a block: up to 128 tokens, 1x128 scales are another graph, as a size of 1 always is
        actual = run(compiled, model, tokens(rows))
        with quantized_linears(recipe):
            expected = run(model, model, tokens(rows))
        stochastic = getattr(recipe, "stochastic_rounding", False)
        assert_close(actual, expected, 0.5 if stochastic else SAME)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.one_fast_case
@pytest.mark.parametrize(
    ("recipe", "codegen"), [*((recipe, "eager") for recipe in DEFAULTS), *THROUGH_INDUCTOR], ids=id_of
)
def test_a_checkpoint_changes_no_bit(recipe: Recipe, codegen: str) -> None:
    class Checkpointed(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, x, use_reentrant=False)

    model, x = build("swiglu", torch.bfloat16), tokens(dtype=torch.bfloat16)
    expected = run(te(model, recipe, codegen=codegen), model, x)
    assert_close(run(te(Checkpointed(model), recipe, codegen=codegen), model, x), expected, 0.0)


@pytest.mark.one_fast_case
@BY_RECIPE
def test_backward_twice_with_retain_graph(recipe: Recipe) -> None:
    """The slow ones find a recipe whose backward writes into what was saved."""
    model = build("gelu_mlp")
    with torch._functorch.config.patch(donated_buffer=False):
        loss = te(model, recipe)(tokens()).square().sum()
        parameters = list(model.parameters())
        first, second = (torch.autograd.grad(loss, parameters, retain_graph=True) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


@pytest.mark.one_fast_case
@BY_RECIPE
def test_frozen_weights_get_no_gradient_and_hand_one_on(recipe: Recipe) -> None:
    """The slow ones find a recipe that saves too little for dgrad alone."""
    model, x = build("gelu_mlp"), tokens()
    model.up.requires_grad_(False), model.down.bias.requires_grad_(False)

    def gradients(call: Callable[..., Any]) -> dict[str, Tensor]:
        model.zero_grad()
        inputs = x.clone().requires_grad_()
        call(inputs).square().sum().backward()
        assert model.up.weight.grad is None and model.up.bias.grad is None and model.down.bias.grad is None
        return {"x": inputs.grad, "weight": model.down.weight.grad.clone()}

    actual = gradients(te(model, recipe))
    with quantized_linears(recipe):
        assert_close(actual, gradients(model), SAME)


@pytest.mark.one_fast_case
@BY_RECIPE
def test_autocast_over_fp32_weights(recipe: Recipe) -> None:
    """The slow ones find a recipe whose products are not in the dtype of autocast."""
    model, x = build("gelu_mlp"), tokens()
    with torch.autocast("cpu", torch.bfloat16):
        actual, plain = run(te(model, recipe), model, x), run(model, model, x)
    assert all(value.dtype == torch.float32 for name, value in actual.items() if name != "y")
    assert_close(actual, plain, 0.35 if isinstance(recipe, NVFP4BlockScaling) else 0.15)


@pytest.mark.one_fast_case
@pytest.mark.parametrize("recipe", slow_but(2, [*DEFAULTS, NVFP4BlockScaling()]), ids=Recipe.describe)
def test_eight_steps_lower_the_loss_as_they_do_in_bf16(recipe: Recipe) -> None:
    def train(compile_step: Callable[[Any], Any]) -> list[float]:
        model, x = build("swiglu", torch.bfloat16), tokens(dtype=torch.bfloat16)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        target = x.roll(1, -1)

        def step(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x).float(), target.float())
            loss.backward()
            optimizer.step()
            return loss.detach()

        compiled = compile_step(step)
        return [float(compiled(x)) for _ in range(8)]

    plain, actual = train(lambda step: step), train(lambda step: te(step, recipe))
    assert plain[-1] < 0.6 * plain[0]
    assert actual == pytest.approx(plain, rel=0.05 if isinstance(recipe, NVFP4BlockScaling) else 0.02)
