"""Kept weights that take another shape, dtype or layout: no old code is read, and none is broadcast."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from helpers.models.small_models import SwiGLU, another_form
from helpers.weights.kept_weights import WIDTH, assert_same, product, te, tokens
from torch import Tensor, nn
from torch.nn.utils import prune

import te_dynamo
from te_dynamo.weights import cache as weight_cache

STEP = {"weight_cache": "step"}
KEPT = pytest.mark.parametrize("kept", ["frozen", "dropped", "step"])


def keep(model: nn.Module, kept: str) -> Callable[..., Tensor]:
    if kept == "step":
        return te(model, **STEP)
    return te(te_dynamo.freeze(model, drop_weights=kept == "dropped"))


def expected(model: nn.Module, *args: Tensor) -> Tensor:
    """With nothing kept: of a copy, whose weights are new."""
    copy = [nn.Parameter(p.detach().clone(), requires_grad=False) for p in model.parameters()]
    named = dict(zip((name for name, _ in model.named_parameters()), copy, strict=True))
    return te(lambda *xs: torch.func.functional_call(model, named, xs))(*args)


def assert_twice(wanted: Tensor, compiled: Callable[..., Tensor], *args: Tensor) -> None:
    """Of the call that finds another weight, and of one that finds what that call has kept."""
    for _ in range(2):
        assert_same(compiled(*args), wanted)


@pytest.mark.one_fast_case
@torch.no_grad()
@KEPT
def test_data_of_every_form(kept: str) -> None:
    model, x = nn.Linear(32, 32, bias=False), tokens(32, torch.float32)
    compiled = keep(model, kept)
    compiled(x)
    for new in (torch.randn(64, 32), torch.randn(32, 32), torch.randn(32, 32).t(), torch.randn(32, 64)[:, ::2]):
        model.weight.data = new
        another_form()
        assert_twice(product(x, new), compiled, x)
    for dtype in (torch.bfloat16, torch.float32):
        model.to(dtype)
        assert_same(compiled(x.to(dtype)), product(x.to(dtype), model.weight))


@pytest.mark.one_fast_case
@torch.no_grad()
@pytest.mark.parametrize("kept", ["frozen", "step"])
def test_fewer_experts(kept: str) -> None:
    """Codes of one expert would fit those of two by broadcasting."""

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(2, 64, 32).bfloat16())

        def forward(self, x: Tensor, ends: Tensor) -> Tensor:
            return F.grouped_mm(x, self.weight.transpose(-2, -1), offs=ends)

    torch.manual_seed(0)
    model, x = Experts(), tokens(32)[0]
    compiled = keep(model, kept)
    for groups in (2, 1, 4):
        model.weight.data = torch.randn(groups, 64, 32).bfloat16()
        another_form()
        ends = torch.arange(1, groups + 1, dtype=torch.int32) * (8 // groups)
        assert_twice(expected(model, x, ends), compiled, x, ends)


@pytest.mark.one_fast_case
@torch.no_grad()
@KEPT
def test_a_stack_of_other_rows(kept: str) -> None:
    torch.manual_seed(0)
    model, x = SwiGLU(WIDTH).bfloat16(), tokens()
    compiled = keep(model, kept)
    compiled(x)
    for hidden in (128, 48, 256):
        model.gate.weight.data, model.up.weight.data = torch.randn(2, hidden, WIDTH).bfloat16()
        model.down.weight.data = torch.randn(WIDTH, hidden).bfloat16()
        another_form()
        assert_twice(expected(model, x), compiled, x)


@pytest.mark.one_fast_case
@torch.no_grad()
@pytest.mark.parametrize("kept", ["frozen", "step"])
def test_pruning_and_another_parameter(kept: str) -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(32, 48, bias=False).bfloat16(), tokens(32)
    compiled = keep(model, kept)
    compiled(x)
    prune.l1_unstructured(model, "weight", 0.5)
    assert_twice(product(x, model.weight), compiled, x)
    prune.remove(model, "weight")
    assert_same(compiled(x), product(x, model.weight))
    model.weight = nn.Parameter(torch.randn(64, 32).bfloat16())
    assert_twice(product(x, model.weight), compiled, x)


@torch.no_grad()
def test_no_part_of_what_a_cuda_graph_reads_is_written_when_the_rest_moves() -> None:
    """It would go on with old codes and new scales."""
    model, x = te_dynamo.freeze(nn.Linear(32, 32, bias=False)), tokens(32, torch.float32)
    compiled = te(model)
    compiled(x)
    (entry,) = weight_cache._entries[model.weight].values()
    held, values = dict(entry.buffers), {name: buffer.clone() for name, buffer in entry.buffers.items()}
    model.weight.data = torch.randn(64, 32)
    another_form()
    compiled(x)
    assert all(torch.equal(held[name], values[name]) for name in held)
    assert all(entry.buffers[name].data_ptr() != held[name].data_ptr() for name in held)
