"""What the tests of training share: a small block, its compiled form, and the gradients of one step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.models.small_models import Attention, Residual, SwiGLU
from helpers.oracles.fp8_oracle import relative_error
from torch import Tensor, nn

EAGER = {"codegen": "eager"}
SAME = 5e-3
"""Two formulations of FP8 in fp32 differ by the order of sums, and by the few values that pushes over an edge."""
CODEGENS = ["eager", pytest.param("inductor", marks=pytest.mark.slow)]


def te(model: Callable[..., Any], dynamic: bool | None = None, **options: Any) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(model, backend="te", dynamic=dynamic, options={**EAGER, **options})


def block(dtype: torch.dtype = torch.bfloat16) -> Residual:
    torch.manual_seed(0)
    return Residual(Attention(), SwiGLU()).to(dtype)


def tokens(rows: int = 24, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    torch.manual_seed(rows)
    return torch.randn(2, rows, 32).to(dtype)


def gradients(call: Callable[..., Any], model: nn.Module, x: Tensor) -> list[Tensor]:
    """Output, and the gradient of every parameter that learns, for the loss sum(y^2)."""
    model.zero_grad()
    y = call(x)
    y.float().square().sum().backward()
    return [y.detach(), *(p.grad for p in model.parameters() if p.requires_grad)]


def assert_close(actual: list[Tensor], expected: list[Tensor], bound: float) -> None:
    errors = [relative_error(a, e) for a, e in zip(actual, expected, strict=True)]
    assert max(errors) <= bound, errors


def train(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    model(x).square().mean().backward()
    return [x.detach(), *(p.grad.clone() for p in model.parameters())]
