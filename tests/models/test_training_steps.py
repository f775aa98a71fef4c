"""Whole training steps: the loss and the backward inside the compiled function, optimizers, clipping, loss scaling. Each beside
the same steps with FP8 written a second time, or in the model's own precision."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.models.small_models import Residual, SwiGLU
from helpers.models.snapshot_models import SwigluMLP
from helpers.models.training import CODEGENS, SAME, assert_close, block, te, tokens
from helpers.oracles.fp8_oracle import fp8_linears
from torch import Tensor, nn

import te_dynamo


@pytest.mark.parametrize("codegen", CODEGENS)
def test_the_loss_inside_the_compiled_function(codegen: str) -> None:
    model = block(torch.float32)
    x, target = tokens(dtype=torch.float32), tokens(25, torch.float32)[:, :24]

    def loss(x: Tensor) -> Tensor:
        return F.mse_loss(model(x), target)

    compiled = te(loss, codegen=codegen)
    actual = torch.autograd.grad(compiled(x), list(model.parameters()))
    with fp8_linears():
        expected = torch.autograd.grad(loss(x), list(model.parameters()))
    assert_close(list(actual), list(expected), SAME)


def train(compile_step: Callable[[Any], Any], dtype: torch.dtype, steps: int = 20) -> list[float]:
    """The losses of some steps towards a linear map of the input; forward, backward and update are one function."""
    model = block(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    x = tokens(128, dtype)
    target = x @ torch.linspace(-1, 1, 32).sin().outer(torch.linspace(-3, 3, 32)).to(dtype) / 8

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x).float(), target.float())
        loss.backward()
        optimizer.step()
        return loss.detach()

    compiled = compile_step(step)
    return [float(compiled(x)) for _ in range(steps)]


@pytest.mark.slow
def test_twenty_steps_lower_the_loss_as_they_do_uncompiled() -> None:
    actual, plain = train(te, torch.bfloat16), train(lambda step: step, torch.bfloat16)
    assert plain[-1] < 0.7 * plain[0]
    assert actual == pytest.approx(plain, rel=0.02)


@pytest.mark.slow
def test_steps_are_those_of_fp8_written_a_second_time() -> None:
    actual = train(te, torch.float32, steps=6)
    with fp8_linears():
        assert actual == pytest.approx(train(lambda step: step, torch.float32, steps=6), rel=SAME)


# ---- backward inside the compiled function


@pytest.mark.parametrize("codegen", CODEGENS)
@pytest.mark.parametrize("how", ["backward", pytest.param("grad", marks=pytest.mark.slow)])
def test_backward_in_one_graph(how: str, codegen: str) -> None:
    """By torch's own switch. The graph is one without gradient, and backward is fused in it as it is elsewhere."""
    torch.manual_seed(0)
    model, x = SwigluMLP().bfloat16(), torch.randn(32, 64).bfloat16()
    parameters = list(model.parameters())
    expected = torch.autograd.grad(te(model, codegen=codegen)(x).float().square().sum(), parameters)

    def step(x: Tensor) -> tuple[Tensor, ...]:
        loss = model(x).float().square().sum()
        if how == "grad":
            return torch.autograd.grad(loss, parameters)
        loss.backward()
        return (loss.detach(),)

    torch._dynamo.reset()
    with torch._dynamo.config.patch(trace_autograd_ops=True), te_dynamo.capture() as graphs:
        result = torch.compile(step, backend="te", fullgraph=True, options={"codegen": codegen})(x)
    actual = list(result) if how == "grad" else [p.grad for p in parameters]
    assert_close(actual, list(expected), 0.0)
    assert "te.gated_backward_quantize(" in graphs["inference"]


@pytest.mark.one_fast_case
@pytest.mark.parametrize("how", ["backward", "grad"])
def test_microbatches_in_one_graph_add_into_the_gradient(how: str) -> None:
    """The products of later microbatches have the gradient so far as their addend."""
    torch.manual_seed(0)
    model, x = nn.Linear(64, 64, bias=False).bfloat16(), torch.randn(96, 64).bfloat16()
    call = te(model)
    for part in x.chunk(3):
        call(part).float().square().sum().backward()
    expected, model.weight.grad = model.weight.grad, None

    def step(x: Tensor) -> Tensor:
        total = None
        for part in x.chunk(3):
            loss = model(part).float().square().sum()
            if how == "backward":
                loss.backward()
            else:
                (gradient,) = torch.autograd.grad(loss, [model.weight])
                total = gradient if total is None else total + gradient
        return loss.detach() if total is None else total

    torch._dynamo.reset()
    with torch._dynamo.config.patch(trace_autograd_ops=True), te_dynamo.capture() as graphs:
        result = torch.compile(step, backend="te", fullgraph=True, options={"codegen": "eager"})(x)
    assert torch.equal(result if how == "grad" else model.weight.grad, expected)  # type: ignore[arg-type]
    assert graphs["inference"].count("addend=") == 2 and "aten.add" not in graphs["inference"]


def test_backward_inside_breaks_the_graph_and_says_how_not_to() -> None:
    model = SwiGLU()
    step = te(lambda x: model(x).square().sum().backward())
    step(torch.randn(24, 32))  # two graphs
    assert all(p.grad is not None for p in model.parameters())
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="trace_autograd_ops"):
        torch.compile(lambda x: model(x).sum().backward(), backend="te", fullgraph=True)(torch.randn(24, 32))


# ---- optimizers


def losses(
    model: nn.Module, call: Callable[..., Any], step: Callable[[], Any], clip: float | None = 0.5
) -> list[float]:
    """Of four steps towards zero, the gradient's norm clipped."""
    x = tokens(dtype=torch.float32)
    found = []
    for _ in range(4):
        model.zero_grad()
        loss = call(x).square().mean()
        loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        step()
        found.append(loss.item())
    return found


def small() -> nn.Module:
    torch.manual_seed(0)
    return Residual(SwiGLU())


Optimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Optimizer] = {
    "foreach": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, foreach=True),
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
}


@pytest.mark.parametrize(
    "name, how",
    [
        ("foreach", "uncompiled"),
        pytest.param("fused", "uncompiled", marks=pytest.mark.slow),
        pytest.param("sgd", "uncompiled", marks=pytest.mark.slow),
        *(pytest.param(name, how, marks=pytest.mark.slow) for name in OPTIMIZERS for how in ("eager", "inductor")),
    ],
)
def test_optimizers_see_the_gradients_and_the_model_what_they_write(name: str, how: str) -> None:
    model = small()
    optimizer = OPTIMIZERS[name](model.parameters())
    call = te(model)
    step = optimizer.step
    if how != "uncompiled":
        step = torch.compile(optimizer.step, backend="te", options={"codegen": how})
    actual = losses(model, call, step)
    other = small()
    with fp8_linears():
        expected = losses(other, other, OPTIMIZERS[name](other.parameters()).step)
    assert actual == pytest.approx(expected, rel=SAME)
    assert actual[-1] < actual[0]


def test_loss_scaling_skips_what_overflows_and_changes_nothing_else() -> None:
    """GradScaler under fp16 autocast: FP8 has a scale of its own for each tensor, so only fp16 around it overflows."""

    def run(compiled: bool) -> tuple[list[float], list[float]]:
        model = small()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**26, growth_interval=2)
        call, x = te(model) if compiled else model, tokens(dtype=torch.float32)
        found: tuple[list[float], list[float]] = ([], [])
        for _ in range(8):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = call(x).float().square().mean()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            found[0].append(loss.item())
            found[1].append(scaler.get_scale())
        return found

    (actual, scales), (plain, plain_scales) = run(True), run(False)
    assert scales[0] == 2.0**25 and plain_scales[0] == 2.0**25, "the first step overflows fp16, with FP8 and without"
    assert scales[-1] == max(scales[-3:]) or scales[-1] < scales[0]
    assert actual[0] == actual[1] and actual[-1] < actual[0], "a skipped step writes nothing, a later one does"
    assert actual == pytest.approx(plain, rel=0.05)
