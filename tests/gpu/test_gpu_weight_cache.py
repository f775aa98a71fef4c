"""Kept weights on a GPU: CUDA graphs, several streams, memory, launches."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from helpers.models.small_models import SwiGLU, another_form
from torch import Tensor, nn

import te_dynamo

pytestmark = pytest.mark.gpu
WIDTH = 512


def model(width: int = WIDTH) -> nn.Module:
    torch.manual_seed(0)
    return SwiGLU(width).to("cuda", torch.bfloat16)


def tokens(rows: int = 64, width: int = WIDTH) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(rows, width, device="cuda", dtype=torch.bfloat16)


def expected(module: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.compile(lambda m, x: m(x), backend="te")(module, x)


def copy_of(module: nn.Module) -> nn.Module:
    other = model()
    other.load_state_dict(module.state_dict())
    return other


@pytest.mark.parametrize("recipe", ["float8_current_scaling", "float8_block_scaling", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("rows", [1, 64, 2048])
def test_frozen_bits(recipe: str, rows: int) -> None:
    module, x = model(), tokens(rows)
    with torch.no_grad():
        before = torch.compile(module, backend="te", options={"recipe": recipe})(x)
        torch._dynamo.reset()
        compiled = torch.compile(te_dynamo.freeze(module, drop_weights=True), backend="te", options={"recipe": recipe})
        for _ in range(2):
            torch.testing.assert_close(compiled(x), before, rtol=0, atol=0)


@pytest.mark.parametrize("rows", [16, 2048])
def test_a_cuda_graph_sees_weights_that_were_frozen_anew(rows: int) -> None:
    module, x = te_dynamo.freeze(model()), tokens(rows)
    compiled = torch.compile(module, backend="te")
    with torch.no_grad():
        compiled(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = compiled(x)
        graph.replay()
        torch.testing.assert_close(out, expected(copy_of(module), x), rtol=0, atol=0)
        module.down.weight.mul_(2)
        compiled(x)
        graph.replay()
        torch.testing.assert_close(out, expected(copy_of(module), x), rtol=0, atol=0)


@pytest.mark.parametrize("options", [{}, {"weight_cache": "step"}], ids=["default", "step"])
def test_a_captured_training_step_quantizes_at_each_replay(options: dict[str, str]) -> None:
    module, x = model(), tokens(256)
    compiled = torch.compile(module, backend="te", options=options)
    for _ in range(2):
        compiled(x).sum().backward()
    module.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = compiled(x)
    for _ in range(2):
        with torch.no_grad():
            module.up.weight.mul_(2)
        graph.replay()
        torch.testing.assert_close(out, expected(copy_of(module), x), rtol=0, atol=0)


@pytest.mark.parametrize("freeze", [True, False], ids=["frozen", "step"])
def test_reduce_overhead(freeze: bool) -> None:
    module, x = model(), tokens(256)
    if freeze:
        te_dynamo.freeze(module)
        compiled = torch.compile(module, backend="te", mode="reduce-overhead")
    else:
        settings = torch._inductor.list_mode_options("reduce-overhead")
        compiled = torch.compile(module, backend="te", options={"weight_cache": "step", **settings})
    with torch.set_grad_enabled(not freeze):
        for step in range(6):
            torch.compiler.cudagraph_mark_step_begin()
            y = compiled(x).clone()
            if not freeze:
                module.zero_grad()  # or .grad would be a graph's output that the next step overwrites
                y.sum().backward()
            torch.testing.assert_close(y.detach(), expected(copy_of(module), x), rtol=0, atol=0)
            if step % 2:
                with torch.no_grad():
                    module.gate.weight.add_(0.01)


def test_another_stream_waits_for_the_buffers() -> None:
    """The first call quantizes behind a long queue; a call on a stream of its own must not read earlier."""
    module, x = te_dynamo.freeze(model(2048)), tokens(16, 2048)
    compiled = torch.compile(module, backend="te")
    with torch.no_grad():
        right = compiled(x).clone()
        te_dynamo.invalidate(module)
        module.down.weight.mul_(-1)  # old bytes would give the old sign
        torch.cuda.synchronize()
        torch.cuda._sleep(200_000_000)
        compiled(x)
        other = torch.cuda.Stream()
        with torch.cuda.stream(other):
            result = compiled(x)
        torch.cuda.synchronize()
    error = (result + right).float().norm() / right.float().norm()
    assert error < 0.01, "nearly the negative: a tensor core may round the two differently"


def test_a_write_on_another_stream() -> None:
    module, x = te_dynamo.freeze(model()), tokens()
    compiled = torch.compile(module, backend="te")
    with torch.no_grad():
        compiled(x)
        other = torch.cuda.Stream()
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            torch.cuda._sleep(50_000_000)
            module.down.weight.mul_(2)
        torch.cuda.current_stream().wait_stream(other)
        torch.testing.assert_close(compiled(x), expected(copy_of(module), x), rtol=0, atol=0)


def test_a_frozen_model_that_moves_between_devices() -> None:
    module, x = te_dynamo.freeze(model().cpu()), tokens()
    compiled = torch.compile(module, backend="te")
    with torch.no_grad():
        for device in ("cpu", "cuda", "cpu", "cuda"):
            module.to(device)
            for _ in range(2):
                y = compiled(x.to(device))
            assert y.device.type == device
        torch.testing.assert_close(y, expected(copy_of(module), x), rtol=0, atol=0)


def test_a_cuda_graph_of_another_shape_is_captured_anew() -> None:
    module, x = te_dynamo.freeze(model()), tokens()
    compiled = torch.compile(module, backend="te")
    with torch.no_grad():
        for hidden in (2 * WIDTH, 4 * WIDTH):
            for linear in (module.gate, module.up):
                linear.weight.data = torch.randn(hidden, WIDTH, device="cuda", dtype=torch.bfloat16)
            module.down.weight.data = torch.randn(WIDTH, hidden, device="cuda", dtype=torch.bfloat16)
            another_form()
            compiled(x)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = compiled(x)
            graph.replay()
            torch.testing.assert_close(out, expected(copy.deepcopy(module), x), rtol=0, atol=0)


def test_a_load_that_fails_needs_room_for_one_weight() -> None:
    module = te_dynamo.freeze(model(2048), drop_weights=True)
    compiled, x = torch.compile(module, backend="te"), tokens(16, 2048)
    with torch.no_grad():
        before = compiled(x).clone()
        wrong = {name: torch.zeros(3, 3) for name in module.state_dict()}
        torch.cuda.synchronize()
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        with pytest.raises(RuntimeError, match="size mismatch"):
            module.load_state_dict(wrong)
        assert torch.cuda.memory_allocated() == held
        values = 2 * module.down.weight.numel()
        assert torch.cuda.max_memory_allocated() - held < 6 * values, (
            "one in fp32, twice, and in bf16; all three would be 7"
        )
        torch.testing.assert_close(compiled(x), before, rtol=0, atol=0)


def test_dropping_halves_the_memory() -> None:
    before = torch.cuda.memory_allocated()
    module = model(2048)
    held = torch.cuda.memory_allocated() - before
    compiled = torch.compile(te_dynamo.freeze(module, drop_weights=True), backend="te")
    with torch.no_grad():
        compiled(tokens(16, 2048))
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() - before < 0.55 * held


def casts(call: Callable[[], None]) -> int:
    """Quantizing launches that the profiler sees on the GPU."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize()
    names = ("quantize_cast_kernel", "quantize_stacked_kernel")  # one a tensor, one a stack
    return sum(any(name in event.name for name in names) for event in profiler.events())


def test_a_profile_shows_one_quantization_a_weight_and_step() -> None:
    """Whatever the number of microbatches: what does not grow with it is the weights'."""
    module, x = model(), tokens(1024)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    compiled = torch.compile(module, backend="te", options={"weight_cache": "step"})

    def step(microbatches: int) -> None:
        for _ in range(microbatches):
            compiled(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):
        step(1)
    one, two, five = (casts(lambda count=count: step(count)) for count in (1, 2, 5))  # type: ignore[misc]
    assert five - two == 3 * (two - one), "each microbatch quantizes the same"
    assert one - (two - one) == 2, "the stack of gate and up, and down"


def test_a_frozen_call_launches_no_quantization_of_a_weight() -> None:
    module, x = te_dynamo.freeze(model()), tokens()
    compiled = torch.compile(module, backend="te")
    with torch.no_grad():
        compiled(x)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            compiled(x)
            torch.cuda.synchronize()
    names = [
        event.name
        for event in profiler.events()
        if "amax" in event.name or "cast" in event.name or "quantize" in event.name
    ]
    assert len(names) <= 4, names  # x, and the activation
