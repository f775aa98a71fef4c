"""What goes wrong in the middle of training: a clear error or a right result, and the next step is right."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from helpers.models.small_models import SwiGLU, WrittenRMSNorm
from helpers.models.training import CODEGENS, SAME, assert_close, gradients, te
from helpers.oracles.fp8_oracle import fp8_linears
from torch import Tensor, nn

import te_dynamo
from te_dynamo.recipe import Float8CurrentScaling


def model_and_input(dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return SwiGLU().to(dtype), torch.randn(24, 32).to(dtype)


def assert_right(call: Any, model: nn.Module, x: Tensor) -> None:
    actual = gradients(call, model, x)
    with fp8_linears():
        assert_close(actual, gradients(model, model, x), SAME)


# ---- a parameter changes between forward and backward


def test_a_weight_written_before_backward_has_the_gradient_of_its_forward() -> None:
    """Backward reads the quantized copies that forward saved: nothing that was written since."""
    model, x = model_and_input()
    compiled = te(model)
    expected = gradients(compiled, model, x)[1:]
    loss = compiled(x).square().sum()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    assert_close(list(torch.autograd.grad(loss, list(model.parameters()))), expected, 0.0)
    assert_right(compiled, model, x)


@pytest.mark.parametrize(
    "model, options",
    [
        (nn.Linear(32, 64, bias=False), {"recipe": Float8CurrentScaling(backward="high_precision")}),
        (nn.Sequential(WrittenRMSNorm(), nn.Linear(32, 64, bias=False)), {}),
    ],
    ids=["high precision backward", "norm"],
)
def test_what_is_saved_as_it_is_raises_torchs_version_error(model: nn.Module, options: dict[str, Any]) -> None:
    x = torch.randn(16, 32, requires_grad=True)
    compiled = te(model, **options)
    loss = compiled(x).sum()
    with torch.no_grad():
        next(model.parameters()).add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    assert_close([compiled(x).sum()], [te(model, **options)(x).sum()], 0.0)


class OfAChunk(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.chunk(2, -1)[0])


@pytest.mark.one_fast_case
@pytest.mark.parametrize("codegen", ["inductor", "eager"])
@pytest.mark.parametrize(
    "layer, shape",
    [(nn.Linear(32, 64), (16, 32)), (nn.Linear(32, 64), (2, 8, 32)), (OfAChunk(32, 64), (2, 8, 64))],
    ids=["itself", "a view", "a user's view"],
)
def test_an_input_that_backward_reads_raises_torchs_version_error(
    layer: nn.Module, shape: tuple[int, ...], codegen: str
) -> None:
    """A view of it that Inductor's code makes would have no version counter."""
    x = torch.randn(shape)
    y = te(layer, recipe=Float8CurrentScaling(backward="high_precision"), codegen=codegen)(x)
    x.add_(3)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


# ---- a parameter is another between calls


def test_a_dtype_that_changes_between_calls() -> None:
    model, x = model_and_input()
    compiled = te(model)
    for dtype in (torch.float32, torch.bfloat16, torch.float32):
        model.to(dtype)
        actual = gradients(compiled, model, x.to(dtype))
        assert all(gradient.dtype == dtype for gradient in actual)
        with fp8_linears():
            expected = gradients(model, model, x.to(dtype))
        assert_close(actual, expected, SAME if dtype == torch.float32 else 0.05)


def test_a_device_that_changes_between_calls() -> None:
    model, x = model_and_input()
    compiled = te(model)
    before = compiled(x)
    assert compiled(x).device.type == "cpu" and model.to("meta") is model
    assert compiled(x.to("meta")).device.type == "meta"
    with pytest.raises((RuntimeError, torch._dynamo.exc.TorchRuntimeError), match="device"):
        compiled(x)  # the input stayed behind
    again, _ = model_and_input()
    model.to_empty(device="cpu").load_state_dict(again.state_dict())
    assert torch.equal(compiled(x), before)


# ---- threads


@pytest.mark.parametrize("codegen", CODEGENS)
def test_threads_that_compile_at_once(codegen: str) -> None:
    """The same code for models of their own, and each gets its own gradients."""
    torch._dynamo.reset()
    jobs = []
    for seed in range(3):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(32, 64, bias=False), nn.ReLU(), nn.Linear(64, 32, bias=False))
        jobs.append((model, torch.randn(16 + 16 * seed, 32)))
    results: dict[int, list[Tensor]] = {}
    start = threading.Barrier(len(jobs))

    def run(number: int) -> None:
        model, x = jobs[number]
        compiled = torch.compile(model, backend="te", dynamic=False, options={"codegen": codegen})
        start.wait()
        results[number] = gradients(compiled, model, x)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, (model, x) in enumerate(jobs):
        with fp8_linears():
            assert_close(results[number], gradients(model, model, x), SAME)


# ---- exceptions


class Interrupted(Exception):
    pass


def test_an_exception_in_backward_leaves_nothing_behind() -> None:
    model, x = model_and_input()
    compiled = te(model)

    def interrupt(gradient: Tensor) -> None:
        raise Interrupted

    handle = model.gate.weight.register_hook(interrupt)
    loss = compiled(x).square().sum()
    with pytest.raises(Interrupted):
        loss.backward()
    handle.remove()
    assert_right(compiled, model, x)


@pytest.mark.parametrize(
    "phase", ["forward", *(pytest.param(p, marks=pytest.mark.slow) for p in ("joint", "backward"))]
)
def test_an_exception_while_compiling_leaves_nothing_behind(phase: Any) -> None:
    model, x = model_and_input()
    calls = 0

    def fails_once(graph: torch.fx.Graph) -> int:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise Interrupted("not this time")
        return 0

    compiled = te(model)
    with te_dynamo.register_graph_fusion(fails_once, phase=phase):
        with pytest.raises(Exception, match="not this time"):
            gradients(compiled, model, x)
        model.zero_grad()
        assert_right(compiled, model, x)
    assert calls > 1
    with te_dynamo.capture() as graphs:
        assert_right(te(model), model, x)
    assert {"match", "joint", "forward", "backward"} <= set(graphs.stages)


def test_an_exception_in_the_model_leaves_nothing_behind() -> None:
    model, x = model_and_input()
    fail = True

    @torch._dynamo.disable
    def between() -> None:
        if fail:
            raise Interrupted

    class Failing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.head = model, nn.Linear(32, 16, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            y = self.inner(x)
            between()
            return self.head(y)

    whole = Failing()
    compiled = te(whole)
    with pytest.raises(Interrupted):
        compiled(x)
    fail = False
    assert_right(compiled, whole, x)
