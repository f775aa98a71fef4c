"""Recipes as values: their quantizers, their errors, their names, and the rules that mix them in one model."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from helpers.models.recipe_cases import DEFAULTS
from torch import nn

import te_dynamo
from te_dynamo import recipe as recipes
from te_dynamo.dialect.linear import LinearConfig
from te_dynamo.dialect.multiply import Operand, multiply
from te_dynamo.errors import InvalidOptionError, QuantizationError
from te_dynamo.quantized.quantizers import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8RowwiseQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    check_product,
)
from te_dynamo.recipe import (
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowwiseScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
)

ALL = [Float8CurrentScaling, Float8RowwiseScaling, Float8BlockScaling, MXFP8BlockScaling, NVFP4BlockScaling]
EAGER = {"codegen": "eager"}


# ---- values


def test_names() -> None:
    assert recipes.names() == ["float8_block_scaling", "float8_current_scaling", "float8_rowwise", "mxfp8", "nvfp4"]
    assert {recipe.name for recipe in DEFAULTS} == set(recipes.names()), "whole models run in each"
    assert [recipes.by_name(cls.name) for cls in ALL] == [cls() for cls in ALL]


@pytest.mark.parametrize(
    ("recipe", "x", "weight", "dy"),
    [
        (
            Float8CurrentScaling(),
            Float8CurrentScalingQuantizer(),
            Float8CurrentScalingQuantizer(),
            Float8CurrentScalingQuantizer(fp8_format="e5m2"),
        ),
        (
            Float8RowwiseScaling(amax_epsilon=0.5),
            Float8RowwiseQuantizer(amax_epsilon=0.5),
            Float8RowwiseQuantizer(amax_epsilon=0.5),
            Float8RowwiseQuantizer(fp8_format="e5m2", amax_epsilon=0.5),
        ),
        (
            Float8BlockScaling(),
            Float8BlockQuantizer(block_dims=1),
            Float8BlockQuantizer(block_dims=2),
            Float8BlockQuantizer(block_dims=1),
        ),
        (
            Float8BlockScaling(power_of_two_scales=False, amax_epsilon=0.5, backward_format="e5m2"),
            Float8BlockQuantizer(power_of_two_scale=False, amax_epsilon=0.5),
            Float8BlockQuantizer(block_dims=2, power_of_two_scale=False, amax_epsilon=0.5),
            Float8BlockQuantizer(fp8_format="e5m2", power_of_two_scale=False, amax_epsilon=0.5),
        ),
        (MXFP8BlockScaling(), MXFP8Quantizer(), MXFP8Quantizer(), MXFP8Quantizer()),
        (
            MXFP8BlockScaling(scale_block=128, backward_format="e5m2"),
            MXFP8Quantizer(scale_block=128),
            MXFP8Quantizer(scale_block=128),
            MXFP8Quantizer(fp8_format="e5m2", scale_block=128),
        ),
        (MXFP8BlockScaling(weight_block_dims=2), MXFP8Quantizer(), MXFP8Quantizer(block_dims=2), MXFP8Quantizer()),
        (
            NVFP4BlockScaling(),
            NVFP4Quantizer(hadamard=True),
            NVFP4Quantizer(block_dims=2),
            NVFP4Quantizer(hadamard=True, stochastic_rounding=True),
        ),
        (
            NVFP4BlockScaling(hadamard=False, stochastic_rounding=False, weight_block_dims=1),
            NVFP4Quantizer(),
            NVFP4Quantizer(),
            NVFP4Quantizer(),
        ),
    ],
    ids=lambda value: value.describe() if isinstance(value, Recipe) else "",
)
def test_quantizers_of_a_recipe(recipe: Recipe, x: Any, weight: Any, dy: Any) -> None:
    assert (recipe.input_quantizer(), recipe.weight_quantizer(), recipe.grad_output_quantizer()) == (x, weight, dy)


@pytest.mark.parametrize("cls", ALL)
def test_a_recipe_is_a_frozen_value(cls: type[Recipe]) -> None:
    assert cls() == cls() and hash(cls()) == hash(cls()) and cls(backward="high_precision") != cls()
    with pytest.raises(dataclasses.FrozenInstanceError):
        cls().backward = "high_precision"  # type: ignore[misc]


@pytest.mark.parametrize(
    "recipe",
    [
        *(cls() for cls in ALL),
        Float8BlockScaling(weight_block_dims=1),
        MXFP8BlockScaling(scale_block=128, weight_block_dims=2),
        NVFP4BlockScaling(weight_block_dims=1),
    ],
)
def test_a_weight_is_held_as_the_recipe_of_its_quantizer_holds_it(recipe: Recipe) -> None:
    held = recipe.weight_quantizer()
    assert recipes.of_weight(held).weight_quantizer() == held


@pytest.mark.parametrize("name", ["FP8", "MXFP8", "Float8_Rowwise"])
def test_letters_of_a_name_may_have_any_case(name: str) -> None:
    assert recipes.by_name(name) == recipes.by_name(name.lower())


@pytest.mark.parametrize(("name", "near"), [("tensorwis", "tensorwise"), ("fp9", "fp8"), ("Rowise", "rowwise")])
def test_names_of_other_libraries_are_near_ones_too(name: str, near: str) -> None:
    with pytest.raises(InvalidOptionError, match=f"unknown recipe '{name}'; did you mean '{near}'"):
        recipes.by_name(name)


def test_description_names_what_differs_from_the_defaults() -> None:
    assert MXFP8BlockScaling().describe() == "mxfp8"
    assert MXFP8BlockScaling(scale_block=128).describe() == "mxfp8(scale_block=128)"
    assert MXFP8BlockScaling(weight_block_dims=2).describe() == "mxfp8(weight_block_dims=2)"
    both = NVFP4BlockScaling(backward="high_precision", hadamard=False)
    assert both.describe() == "nvfp4(backward='high_precision', hadamard=False)"


def test_sums_are_in_fp32_unless_asked_for_fast_ones() -> None:
    """In forward too, unlike Transformer Engine's and torchao's."""
    assert all(cls().fast_accum() == (False, False, False) for cls in ALL)
    assert Float8CurrentScaling(fprop_fast_accum=True).fast_accum() == (True, False, False)
    assert Float8CurrentScaling(dgrad_fast_accum=True).fast_accum() == (False, True, False)
    assert Float8CurrentScaling(wgrad_fast_accum=True).fast_accum() == (False, False, True)


def test_fast_accumulation_is_only_of_current_scaling() -> None:
    for cls in ALL[1:]:
        with pytest.raises(TypeError, match="fprop_fast_accum"):
            cls(fprop_fast_accum=True)


# ---- bad values


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Float8CurrentScaling(backward="high_precison"),
            "unknown backward 'high_precison'; did you mean 'high_pr",
        ),
        (lambda: Float8CurrentScaling(fprop_fast_accum="yes"), "unknown fprop_fast_accum 'yes'; valid: False, True"),
        (lambda: Float8CurrentScaling(dgrad_fast_accum=1), "unknown dgrad_fast_accum 1; valid: False, True"),
        (lambda: Float8BlockScaling(backward_format="e5m3"), "unknown backward_format 'e5m3'; did you mean 'e5m2'"),
        (lambda: Float8BlockScaling(weight_block_dims=3), "unknown weight_block_dims 3; valid: 1, 2"),
        (lambda: Float8BlockScaling(amax_epsilon=-1.0), "amax_epsilon: expected a finite number >= 0, got -1.0"),
        (
            lambda: Float8CurrentScaling(amax_epsilon="0"),
            "Float8CurrentScalingQuantizer.amax_epsilon: expected float, got '0'",
        ),  # type: ignore[arg-type]
        (lambda: MXFP8BlockScaling(scale_block=64), "unknown scale_block 64; valid: 128, 32"),
        (lambda: MXFP8BlockScaling(weight_block_dims=3), "unknown weight_block_dims 3; valid: 1, 2"),
        (lambda: NVFP4BlockScaling(weight_block_dims=True), "unknown weight_block_dims True; valid: 1, 2"),
        (lambda: MXFP8BlockScaling(scale_block=True), "unknown scale_block True; valid: 128, 32"),
        (lambda: NVFP4BlockScaling(hadamard=None), "unknown hadamard None; valid: False, True"),
        (lambda: Float8BlockScaling(input_block_dims=2), "Float8BlockScaling: fprop: 2D x 2D: no GEMM multiplies"),
        (lambda: Float8BlockScaling(grad_block_dims=2), "Float8BlockScaling: dgrad: 2D x 2D: no GEMM multiplies"),
        (
            lambda: Float8BlockScaling(input_block_dims=2, grad_block_dims=2, weight_block_dims=1),
            "Float8BlockScaling: wgrad: 2D x 2D: no GEMM multiplies",
        ),
    ],
)
def test_a_bad_field_is_an_error_where_it_is_written(make: Any, message: str) -> None:
    with pytest.raises(InvalidOptionError) as error:
        make()
    assert message in str(error.value)


def test_2d_operands_are_fine_where_they_meet_1d_ones() -> None:
    for dims in ((1, 1, 1), (1, 2, 1), (2, 1, 1), (1, 1, 2)):
        x, weight, dy = dims
        Float8BlockScaling(input_block_dims=x, weight_block_dims=weight, grad_block_dims=dy)


E4, E5 = Float8CurrentScalingQuantizer(), Float8CurrentScalingQuantizer(fp8_format="e5m2")


@pytest.mark.parametrize(
    ("quantizers", "message"),
    [
        ((E5, E5, E4), "fprop: e5m2 x e5m2: FP8 tensor cores do not multiply it"),
        ((E4, E5, E5), "dgrad: e5m2 x e5m2"),
        ((E5, E4, E5), "wgrad: e5m2 x e5m2"),
        ((E4, MXFP8Quantizer(), E4), "fprop: no GEMM multiplies Float8CurrentScalingQuantizer by MXFP8Quantizer"),
        ((Float8BlockQuantizer(block_dims=2),) * 3, "fprop: 2D x 2D"),
        (
            (MXFP8Quantizer(), MXFP8Quantizer(), MXFP8Quantizer(scale_block=128)),
            "dgrad: scale blocks of 128 and 32: expected equal ones",
        ),
        (
            (NVFP4Quantizer(hadamard=True), NVFP4Quantizer(), NVFP4Quantizer()),
            "wgrad: one operand is rotated by the Hadamard transform and the other is not",
        ),
        (
            (NVFP4Quantizer(), NVFP4Quantizer(hadamard=True), NVFP4Quantizer()),
            "dgrad: one operand is rotated by the Hadamard transform",
        ),
    ],
)
def test_operands_without_a_gemm_are_refused_when_a_linear_is_configured(quantizers: Any, message: str) -> None:
    with pytest.raises(QuantizationError, match=message):
        LinearConfig(*quantizers, True, True, False, False, False)


def test_a_product_asks_too() -> None:
    """Not only a linear: blocks of 128 read as blocks of 32 would be another number."""
    one, other = MXFP8Quantizer(scale_block=128), MXFP8Quantizer()
    a, b = (Operand.of(q, torch.ops.te.quantize(torch.ones(32, 64), q), columnwise=False) for q in (one, other))
    with pytest.raises(QuantizationError, match="scale blocks of 128 and 32"):
        multiply(a, b, torch.float32, False)


def test_a_hadamard_transform_of_the_columns_leaves_the_rows_alone() -> None:
    check_product(NVFP4Quantizer(hadamard=True), False, NVFP4Quantizer(block_dims=2), False)
    check_product(NVFP4Quantizer(hadamard=True), True, NVFP4Quantizer(hadamard=True), True)


# ---- which linears a recipe takes


def explained(model: nn.Module, x: torch.Tensor, **options: Any) -> list[tuple[str, str, str]]:
    """(module, recipe, reason) of every linear."""
    rows = te_dynamo.explain(model, x, options={**EAGER, **options}).linears
    return [(row.module, row.recipe, row.reason) for row in rows]


@pytest.mark.parametrize(
    ("cls", "sizes", "reason"),
    [
        (Float8BlockScaling, (48, 80), ""),
        (
            Float8BlockScaling,
            (48, 40),
            "N = 40, K = 48: FP8 GEMMs need N and K to be multiples of 16; padding N to 48 would add 20%, more than 1/16",
        ),
        (MXFP8BlockScaling, (96, 160), ""),
        (
            MXFP8BlockScaling,
            (48, 32),
            "N = 32, K = 48: MXFP8 GEMMs need N and K to be multiples of 32; padding K to 64 would add 33%, more than 1/16",
        ),
        (NVFP4BlockScaling, (48, 80), ""),
        (
            NVFP4BlockScaling,
            (24, 32),
            "N = 32, K = 24: NVFP4 GEMMs need N and K to be multiples of 16; padding K to 32 would add 33%, more than 1/16",
        ),
    ],
)
def test_sizes(cls: type[Recipe], sizes: tuple[int, int], reason: str) -> None:
    k, n = sizes
    model, x = nn.Sequential(nn.Linear(k, n)), torch.randn(7, k)
    assert explained(model, x, recipe=cls()) == [("0", "" if reason else cls.name, reason)]


class Mixed(nn.Module):
    """Linears of several kinds, the module paths as in a Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.ModuleDict({"q": nn.Linear(32, 32, bias=False), "o": nn.Linear(32, 32)})
        self.mlp = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
        self.router = nn.Linear(32, 32)
        self.lm_head = nn.Linear(32, 48, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention["o"](self.attention["q"](x))
        return self.lm_head(x + self.mlp(x) * self.router(x))


RULES = [("lm_head", None), (r"mlp\.0", MXFP8BlockScaling(scale_block=128)), ("mlp", "mxfp8"), ("router", "nvfp4")]


def test_rules_mix_recipes_in_one_model() -> None:
    assert explained(Mixed(), torch.randn(8, 32), recipe="float8_block_scaling", rules=RULES) == [
        ("attention.q", "float8_block_scaling", ""),
        ("attention.o", "float8_block_scaling", ""),
        ("mlp.0", "mxfp8(scale_block=128)", ""),
        ("mlp.2", "mxfp8", ""),
        ("router", "nvfp4", ""),
        ("lm_head", "", "rule 'lm_head' leaves it in the model's precision"),
    ]


def test_norms_and_activations_stay_inductors_where_no_fused_kernel_writes_the_format() -> None:
    model, x = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)), torch.randn(8, 32)
    found = te_dynamo.explain(model, x, options={**EAGER, "recipe": "nvfp4"})
    assert [(row.kind, row.matched, row.reason) for row in found.norms_activations] == [
        (kind, False, "no fused kernel writes NVFP4 with a scale per block of 1x16, hadamard; left to Inductor")
        for kind in ("layer_norm", "gelu")
    ]
    mixed = te_dynamo.explain(model, x, options={**EAGER, "recipe": "nvfp4", "rules": [("3", "float8_rowwise")]})
    assert [row.matched for row in mixed.norms_activations] == [False, True]
