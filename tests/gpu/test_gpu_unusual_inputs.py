"""What kernels are rarely given, on a GPU: no tokens, strided biases, parts of flat parameters, another device, another stream."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import te_dynamo

pytestmark = pytest.mark.gpu
RECIPES = ["float8_current_scaling", "float8_rowwise", "float8_block_scaling", "mxfp8"]
K, N = 1024, 2048


def tokens(rows: int, device: str = "cuda") -> Tensor:
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(rows, K, generator=generator).to(device, torch.bfloat16)


def compiled(function: Any, recipe: str = "float8_current_scaling") -> Any:
    torch._dynamo.reset()
    return torch.compile(function, backend="te", options={"rules": [("", recipe)]})


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("rows", [256, 4096])
def test_a_bias_that_is_a_column_or_one_value(rows: int, recipe: str) -> None:
    weight, x = nn.Parameter(tokens(N)), tokens(rows)
    biases = torch.randn(N, 3, device="cuda", dtype=torch.bfloat16)
    call = compiled(lambda bias: F.linear(x, weight, bias), recipe)
    with torch.no_grad():
        for bias in (biases[:, 1], biases[0, :1].expand(N)):
            assert torch.equal(call(bias), call(bias.contiguous()))


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
@pytest.mark.parametrize("recipe", RECIPES)
def test_no_tokens_behind_a_mask(recipe: str) -> None:
    linear, x = nn.Linear(K, N, device="cuda", dtype=torch.bfloat16), tokens(256)
    call = compiled(lambda mask: linear(x[mask]), recipe)
    for kept in (100, 0, 33):
        linear.zero_grad()
        call(torch.arange(256, device="cuda") < kept).square().sum().backward()
        assert linear.weight.grad is not None and linear.weight.grad.isfinite().all()
        assert bool(linear.weight.grad.any()) == bool(kept)


@pytest.mark.parametrize("recipe", RECIPES)
def test_no_tokens_of_an_eager_operation(recipe: str) -> None:
    linear = te_dynamo.nn.Linear(K, N, device="cuda", params_dtype=torch.bfloat16, recipe=recipe)
    linear(tokens(256)[:0]).sum().backward()
    torch.cuda.synchronize()
    assert linear.weight.grad is not None and not linear.weight.grad.any()


@pytest.mark.parametrize("recipe", ["float8_block_scaling", "mxfp8"])
def test_a_weight_behind_one_value_of_a_flat_parameter(recipe: str) -> None:
    flat = torch.randn(1 + N * K, device="cuda", dtype=torch.bfloat16)
    linear, x = nn.Linear(K, N, bias=False, device="cuda", dtype=torch.bfloat16), tokens(256)
    linear.weight = nn.Parameter(flat[1:].view(N, K))
    call = compiled(linear, recipe)
    with torch.no_grad():
        found = call(x)
        linear.weight = nn.Parameter(flat[1:].view(N, K).clone())
        assert torch.equal(found, call(x))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("how", ["freeze", "step", "eager"])
def test_a_model_that_is_not_on_the_current_device(how: str) -> None:
    linear, x = nn.Linear(K, N, bias=False, dtype=torch.bfloat16), tokens(256, "cpu")
    found = []
    for device in ("cuda:0", "cuda:1"):
        placed: nn.Module = (te_dynamo.nn.Linear if how == "eager" else nn.Linear)(K, N, bias=False)
        placed = placed.to(device, torch.bfloat16)
        placed.load_state_dict(linear.state_dict())
        if how == "eager":
            call: Any = placed
        else:
            options = {"weight_cache": "step"} if how == "step" else {}
            torch._dynamo.reset()
            call = torch.compile(te_dynamo.freeze(placed) if how == "freeze" else placed, backend="te", options=options)
        with torch.no_grad():
            found.append(call(x.to(device)).cpu())
    assert torch.equal(*found)


def test_a_second_graph_on_another_stream_waits() -> None:
    """The first graph quantizes behind a long queue; the second one did not quantize, and must not read earlier."""
    model, x = te_dynamo.freeze(nn.Linear(K, N, bias=False, device="cuda", dtype=torch.bfloat16)), tokens(256)
    first = torch.compile(model, backend="te")
    second = torch.compile(nn.Sequential(model, nn.ReLU()), backend="te")
    with torch.no_grad():
        right = second(x).clone()
        model.weight.mul_(-1)  # old codes would give the old sign
        torch.cuda.synchronize()
        torch.cuda._sleep(200_000_000)
        first(x)
        with torch.cuda.stream(torch.cuda.Stream()):
            result = second(x)
        torch.cuda.synchronize()
        assert torch.equal(result > 0, first(x) > 0) and not torch.equal(result, right)
