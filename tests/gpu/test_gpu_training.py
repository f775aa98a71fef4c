"""Training loops on a GPU: modes with CUDA graphs, a step captured by hand, optimizers, loss scaling."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.models.small_models import MODELS
from torch import Tensor, nn

import te_dynamo

pytestmark = pytest.mark.gpu

STEPS = 6


def model_of(dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    torch.manual_seed(0)
    return MODELS["llama_block"]().to("cuda", dtype)


def batches(dtype: torch.dtype = torch.bfloat16) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    return [(x, x.roll(1, -1)) for x in torch.randn(STEPS, 4, 64, 32, device="cuda", dtype=dtype)]


def train(call: Callable[[Tensor], Tensor], optimizer: torch.optim.Optimizer, dtype: torch.dtype) -> list[float]:
    losses = []
    for x, target in batches(dtype):
        optimizer.zero_grad(set_to_none=True)
        loss = F.mse_loss(call(x).float(), target.float())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, **options)


def reference() -> list[float]:
    model = model_of()
    return train(torch.compile(model, backend="te"), adamw(model, fused=True), torch.bfloat16)


@pytest.mark.parametrize(
    ("mode", "tolerance"), [("reduce-overhead", 1e-3), ("max-autotune", 1e-2), ("max-autotune-no-cudagraphs", 1e-2)]
)
def test_modes_train_as_the_default(mode: str, tolerance: float) -> None:
    """CUDA graphs replay the forward and the backward; weights are written by the optimizer between them. What was timed may add in
    another order."""
    expected = reference()
    torch._dynamo.reset()
    model = model_of()
    actual = train(torch.compile(model, backend="te", mode=mode), adamw(model, fused=True), torch.bfloat16)
    assert actual == pytest.approx(expected, rel=tolerance)
    assert actual[-1] < actual[0]


def test_another_recipe_in_each_step_of_cuda_graphs() -> None:
    losses = []
    for mode in (None, "reduce-overhead"):
        torch._dynamo.reset()
        model, recipes = model_of(), ["float8_current_scaling", None] * (STEPS // 2)
        compiled = torch.compile(model, backend="te", mode=mode)

        def call(x: Tensor, compiled: Any = compiled, recipes: list[str | None] = recipes) -> Tensor:
            te_dynamo.set_recipe(compiled, recipes.pop())
            return compiled(x)  # type: ignore[no-any-return]

        losses.append(train(call, adamw(model, fused=True), torch.bfloat16))
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)


@pytest.mark.parametrize("low_memory", [False, True])
def test_a_step_captured_by_hand_follows_its_static_inputs(low_memory: bool) -> None:
    """Forward, backward and update in one torch.cuda.graph: the inputs are detached buffers that are written between replays."""
    model = model_of()
    expected = train(torch.compile(model, backend="te"), torch.optim.SGD(model.parameters(), lr=0.1), torch.bfloat16)
    torch._dynamo.reset()
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    call = torch.compile(model, backend="te", options={"low_memory": low_memory})
    data = batches()
    x, target = (torch.zeros_like(t) for t in data[0])

    def step() -> Tensor:
        loss = F.mse_loss(call(x).float(), target.float())
        loss.backward()
        return loss.detach()

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # compiles; no weight is written
        for _ in range(3):
            model.zero_grad(set_to_none=True)
            step()
    torch.cuda.current_stream().wait_stream(stream)
    model.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()
        optimizer.step()
    losses = []
    for new_x, new_target in data:
        x.copy_(new_x)
        target.copy_(new_target)
        graph.replay()
        losses.append(loss.item())
    assert losses == pytest.approx(expected, rel=1e-3)


def test_make_graphed_callables_takes_a_compiled_model() -> None:
    """In a process of its own: a capture that fails leaves the generator, and so every later test, broken."""
    command = [sys.executable, "-c", "import test_gpu_training; test_gpu_training.graphed_callables()"]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


EVERY_LINEAR = {"rules": [("", "float8_current_scaling")]}
"""Those of few rows too: no fixture of pytest holds in a process of its own."""


class Compiled(nn.Module):
    """Has `model`'s parameters, and runs it compiled."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self._call = [torch.compile(model, backend="te", options=EVERY_LINEAR)]

    def forward(self, x: Tensor) -> Tensor:
        return self._call[0](x)


def graphed_callables() -> None:
    model = model_of()
    (x, _), *_ = batches()
    # No autograd graph of the parameters may be alive that was made on another stream than the capture's.
    graphed = torch.cuda.make_graphed_callables(Compiled(model), (x.clone(),))
    model.zero_grad(set_to_none=True)
    y = graphed(x)
    y.float().square().sum().backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad(set_to_none=True)
    torch._dynamo.reset()
    expected = torch.compile(model, backend="te", options=EVERY_LINEAR)(x)
    expected.float().square().sum().backward()
    assert torch.equal(y, expected)
    for actual, parameter in zip(gradients, model.parameters(), strict=True):
        assert torch.equal(actual, parameter.grad)


@pytest.mark.parametrize("how", ["fused", "foreach"])
@pytest.mark.parametrize("compiled", [False, True])
def test_optimizers(how: str, compiled: bool) -> None:
    expected = reference()
    torch._dynamo.reset()
    model = model_of()
    optimizer = adamw(model, **{how: True})
    call = torch.compile(model, backend="te")
    if compiled:
        optimizer.step = torch.compile(optimizer.step, backend="te")  # type: ignore[method-assign]
    assert train(call, optimizer, torch.bfloat16) == pytest.approx(expected, rel=1e-2)


def test_loss_scaling_under_fp16_autocast() -> None:
    def run(compiled: bool) -> list[float]:
        torch._dynamo.reset()
        model = model_of(torch.float32)
        call = torch.compile(model, backend="te") if compiled else model
        optimizer, scaler = adamw(model), torch.amp.GradScaler("cuda", init_scale=2.0**24, growth_interval=3)
        losses = []
        for x, target in batches(torch.float32):
            optimizer.zero_grad()
            with torch.autocast("cuda", torch.float16):
                loss = F.mse_loss(call(x).float(), target)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.item())
        return losses

    assert run(True) == pytest.approx(run(False), rel=0.05)
