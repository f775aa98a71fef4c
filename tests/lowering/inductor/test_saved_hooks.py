"""Hooks on saved tensors meet no float8, and backward reads what they give back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.models.training import CODEGENS, assert_close, gradients, te
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

MODEL = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))


def scaled(tensor: Tensor) -> tuple[Tensor, Tensor | None]:
    if not tensor.is_floating_point() or not tensor.numel():
        return tensor, None
    amax = tensor.abs().amax()
    return tensor / amax, amax


def unscaled(packed: tuple[Tensor, Tensor | None]) -> Tensor:
    tensor, amax = packed
    return tensor if amax is None else tensor * amax


HOOKS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "scaled": (scaled, unscaled),
    "numpy": (lambda tensor: tensor.detach().numpy(), torch.from_numpy),
}


@pytest.mark.parametrize("codegen", CODEGENS)
@pytest.mark.parametrize("hooks", HOOKS)
@pytest.mark.parametrize("recipe", ["float8_current_scaling", "float8_block_scaling", "mxfp8"])
def test_hooks(recipe: str, hooks: str, codegen: str) -> None:
    x = torch.randn(32, 64)
    compiled = te(MODEL, recipe=recipe, codegen=codegen)
    expected = gradients(compiled, MODEL, x)

    def hooked(x: Tensor) -> Tensor:
        with saved_tensors_hooks(*HOOKS[hooks]):
            return compiled(x)

    assert_close(gradients(hooked, MODEL, x), expected, 1e-6)


def test_kept_weights_and_a_checkpoint_around_the_model() -> None:
    x = torch.randn(32, 64, requires_grad=True)
    compiled = te(MODEL, weight_cache="step")
    expected = gradients(compiled, MODEL, x)

    def hooked(x: Tensor) -> Tensor:
        with saved_tensors_hooks(*HOOKS["numpy"]):
            return compiled(x)

    assert_close(gradients(hooked, MODEL, x), expected, 0.0)
    assert_close(gradients(lambda x: checkpoint(compiled, x, use_reentrant=False), MODEL, x), expected, 0.0)
