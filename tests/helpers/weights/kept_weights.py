"""Models, inputs and fixtures that tests of kept weights share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.models.small_models import Attention, Residual, SwiGLU
from torch import Tensor, nn

from te_dynamo.dialect.linear import LinearConfig
from te_dynamo.recipe import Float8CurrentScaling

STEP = {"weight_cache": "step"}
EAGER = {"codegen": "eager"}

CODEGENS = ["eager", pytest.param("inductor", marks=pytest.mark.slow)]

SLOW = pytest.mark.slow

WIDTH = 128


def te(model: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return torch.compile(model, backend="te", options={**EAGER, **options})


def block(width: int = WIDTH) -> nn.Module:
    torch.manual_seed(0)
    return Residual(Attention(width), SwiGLU(width), norm=lambda: nn.RMSNorm(width, eps=1e-5)).bfloat16()


def linear(dtype: torch.dtype = torch.float32) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(32, 48, bias=False).to(dtype)


def tokens(width: int = WIDTH, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(2, 8, width).to(dtype)


def product(x: Tensor, weight: Tensor) -> Tensor:
    """The default recipe's, with nothing kept and nothing compiled."""
    config = LinearConfig.from_recipe(Float8CurrentScaling(), input_requires_grad=False, weight_requires_grad=False)
    return torch.ops.te.linear(x, weight.detach(), None, config)[0]


def assert_same(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0)


def train(model: nn.Module, call: Callable[..., Any], batches: list[Tensor], steps: int) -> list[Tensor]:
    """Gradients of every step, accumulated over the batches, and the weights at the end."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    results = []
    for _ in range(steps):
        for x in batches:
            call(x).float().square().mean().backward()
        results += [p.grad.clone() for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return results + [p.detach().clone() for p in model.parameters()]
