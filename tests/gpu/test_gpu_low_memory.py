"""The option "low_memory" on a GPU: the same bits, and the peak that the graph says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.models.gated_models import Gated, GateUpMLP, WideMLP
from torch import Tensor, nn

import te_dynamo
from te_dynamo.passes.dialect.live_memory import peak_bytes

pytestmark = pytest.mark.gpu

TOKENS = 8192


def compiled(model: nn.Module, **options: Any) -> Callable[[Tensor], Tensor]:
    torch._dynamo.reset()
    return torch.compile(model, backend="te", options=options)


def step(call: Callable[[Tensor], Tensor], model: nn.Module, x: Tensor, dy: Tensor) -> list[Tensor]:
    """The gradients of one step; dy is the caller's, and stays."""
    x.grad = None
    model.zero_grad()
    before = dy.clone()
    call(x).backward(dy)
    assert torch.equal(dy, before)
    gradients = [x.grad, *(p.grad for p in model.parameters())]
    assert all(gradient is not None for gradient in gradients)
    return [gradient.clone() for gradient in gradients if gradient is not None]


@pytest.mark.parametrize("model, width", [(WideMLP, 512), (GateUpMLP, 512), (Gated, 64)])
@pytest.mark.parametrize("rows", [TOKENS, 300])
@pytest.mark.parametrize("recipe", ["float8_current_scaling", "float8_block_scaling", "float8_rowwise"])
def test_every_bit_is_the_same(model: type[nn.Module], width: int, rows: int, recipe: str) -> None:
    torch.manual_seed(0)
    module = model().cuda().bfloat16()
    x = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn_like(module(x))
    expected = step(compiled(module, low_memory=False, recipe=recipe), module, x, dy)
    for _ in range(3):  # a program that wrote too early would be wrong now and then
        actual = step(compiled(module, low_memory=True, recipe=recipe), module, x, dy)
        for ours, theirs in zip(actual, expected, strict=True):
            assert torch.equal(ours, theirs)


def test_two_backwards_of_a_retained_graph_agree() -> None:
    module = WideMLP().cuda().bfloat16()
    x = torch.randn(TOKENS, 512, device="cuda", dtype=torch.bfloat16)
    with torch._functorch.config.patch(donated_buffer=False):
        loss = compiled(module, low_memory=True)(x).float().square().sum()
        first, second = (torch.autograd.grad(loss, list(module.parameters()), retain_graph=True) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)


def measured_peak(call: Callable[[Tensor], Tensor], x: Tensor, dy: Tensor, model: nn.Module) -> int:
    """Bytes allocated at the peak of backward, beyond what the caller holds: parameters, x, dy and the output."""
    for _ in range(2):
        model.zero_grad()
        x.grad = None
        held = torch.cuda.memory_allocated()
        y = call(x)
        held += y.untyped_storage().nbytes()
        torch.cuda.reset_peak_memory_stats()
        y.backward(dy)
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - held
        del y  # or the next round would count two outputs as held, of which the caller holds one
    return peak


@pytest.mark.parametrize("recipe, part", [("float8_current_scaling", 0.8), ("float8_rowwise", 0.85)])
def test_peak_is_what_the_graph_says_and_below_bf16s(recipe: str, part: float) -> None:
    torch.mm(torch.ones(64, 64, device="cuda", requires_grad=True), torch.ones(64, 64, device="cuda")).sum().backward()
    module = WideMLP().cuda().bfloat16()
    x = torch.randn(TOKENS, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn_like(x)
    torch._dynamo.reset()
    bf16 = measured_peak(torch.compile(module), x, dy, module)
    peaks = {}
    for low_memory in (False, True):
        with te_dynamo.capture() as graphs:
            call = compiled(module, low_memory=low_memory, recipe=recipe)
            call(x).backward(dy)
        peaks[low_memory] = measured_peak(call, x, dy, module)
        assert peaks[low_memory] == pytest.approx(peak_bytes(graphs.graph("lower.backward")), rel=0.02), low_memory
    assert peaks[True] <= bf16, (peaks, bf16)
    assert peaks[True] < part * peaks[False], peaks
