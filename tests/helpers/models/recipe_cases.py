"""Every recipe, small models that each can hold, and one way to run them: for the tests on the CPU and on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.models.small_models import Attention, GeluMLP, Residual, SwiGLU
from helpers.oracles.fp8_oracle import relative_error
from torch import Tensor, nn

from te_dynamo.recipe import (
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowwiseScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
)

EAGER = {"codegen": "eager"}

RECIPES: dict[str, Recipe] = {
    recipe.describe(): recipe
    for recipe in (
        Float8CurrentScaling(),
        Float8CurrentScaling(fprop_fast_accum=True),
        Float8CurrentScaling(backward="high_precision"),
        Float8RowwiseScaling(),
        Float8RowwiseScaling(power_of_two_scales=True, backward_format="e4m3", amax_epsilon=0.25),
        Float8RowwiseScaling(wgrad="bf16"),
        Float8BlockScaling(),
        Float8BlockScaling(power_of_two_scales=False, backward_format="e5m2"),
        Float8BlockScaling(input_block_dims=2, weight_block_dims=1, amax_epsilon=0.25),
        MXFP8BlockScaling(),
        MXFP8BlockScaling(backward_format="e5m2"),
        MXFP8BlockScaling(scale_block=128),
        MXFP8BlockScaling(weight_block_dims=2),
        MXFP8BlockScaling(scale_block=128, weight_block_dims=2),
        MXFP8BlockScaling(backward="high_precision"),
        NVFP4BlockScaling(stochastic_rounding=False),
        NVFP4BlockScaling(stochastic_rounding=False, hadamard=False, weight_block_dims=1),
    )
}
"""Deterministic ones: stochastic rounding has tests of its own."""

DEFAULTS = [
    Float8CurrentScaling(),
    Float8RowwiseScaling(),
    Float8BlockScaling(),
    MXFP8BlockScaling(),
    MXFP8BlockScaling(scale_block=128),
    NVFP4BlockScaling(stochastic_rounding=False),
]
BY_RECIPE = pytest.mark.parametrize("recipe", DEFAULTS, ids=Recipe.describe)
WIDTH = 160
"""A block of 128 and the start of another; a multiple of every recipe's alignment."""

MODELS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(WIDTH, 96),
    "gelu_mlp": lambda: GeluMLP(WIDTH),
    "swiglu": lambda: SwiGLU(WIDTH),
    "block": lambda: Residual(Attention(WIDTH), SwiGLU(WIDTH), norm=lambda: nn.RMSNorm(WIDTH, eps=1e-5)),
}


def te(model: Callable[..., Any], recipe: Recipe | str | None, dynamic: bool | None = None, **options: Any) -> Any:
    """`model` compiled in `recipe`, the rewritten graphs run as they are unless `options` say otherwise."""
    torch._dynamo.reset()
    return torch.compile(model, backend="te", dynamic=dynamic, options={**EAGER, "recipe": recipe, **options})


def build(name: str, dtype: torch.dtype = torch.float32, device: str = "cpu") -> nn.Module:
    """The model of that name, its weights the same at every call."""
    torch.manual_seed(0)
    return MODELS[name]().to(device, dtype)


def tokens(rows: int = 75, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    """[2, rows, WIDTH]: 2 * 75 rows are a block of 128 and the start of another too."""
    torch.manual_seed(rows)
    return torch.randn(2, rows, WIDTH).to(device, dtype)


def run(call: Callable[..., Any], model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """The output of `call`, and the gradients of x and of every parameter of `model`."""
    model.zero_grad()
    x = x.clone().requires_grad_()
    y = call(x)
    torch.manual_seed(1)
    y.backward(torch.randn_like(y))
    return {"y": y.detach(), "x": x.grad, **{name: p.grad.clone() for name, p in model.named_parameters()}}


def assert_close(actual: dict[str, Tensor], expected: dict[str, Tensor], bound: float) -> None:
    """Every relative error at most `bound`."""
    errors = {name: relative_error(actual[name], value) for name, value in expected.items()}
    assert all(error <= bound for error in errors.values()), errors
