"""The whole pipeline on a GPU: what Inductor's code launches, and that its numbers are those of the unfused graphs."""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import te_dynamo

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import models

pytestmark = pytest.mark.gpu

MODELS: dict[str, Callable[[], nn.Module]] = {
    "swiglu": lambda: models.GatedMLP(256, 512),
    "gate_up": lambda: models.GateUpMLP(256, 512),
    "gelu": lambda: models.GeluMLP(256, 512),
    "block": lambda: models.llama_block(256, 512, 4, 2),
}


def build(name: str, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]().to("cuda", dtype)


def rows(count: int, dtype: torch.dtype = torch.bfloat16, width: int = 256) -> torch.Tensor:
    torch.manual_seed(count)
    return torch.randn(2, count, width, device="cuda", dtype=dtype, requires_grad=True)


def step(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Output and every gradient of one forward and backward."""
    model.zero_grad()
    x.grad = None
    y = model(x)
    torch.manual_seed(1)
    y.backward(torch.randn_like(y))
    named = ((name.removeprefix("_orig_mod."), p) for name, p in model.named_parameters())
    gradients = {name: p.grad.clone() for name, p in named if p.grad is not None}
    assert x.grad is not None
    return y.detach().clone(), {**gradients, "x": x.grad.clone()}


def compiled(model: nn.Module, mode: str | None = None, dynamic: bool | None = None, **options: object) -> nn.Module:
    torch._dynamo.reset()
    if mode is not None:
        return torch.compile(copy.deepcopy(model), backend="te", mode=mode, dynamic=dynamic)
    return torch.compile(copy.deepcopy(model), backend="te", dynamic=dynamic, options=options)


ABOVE_SHARED_INPUT = ("gate.weight", "up.weight", "down.weight")


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("count", [16, 19, 256])
def test_fused_is_unfused_bit_for_bit(name: str, count: int) -> None:
    """Graphs as they are, so that nothing but our own kernels decides: also the norms' gradients then agree."""
    model, x = build(name), rows(count)
    fused = step(compiled(model, codegen="eager"), x)
    unfused = step(compiled(model, codegen="eager", fusions=False), x)
    torch.testing.assert_close(fused[0], unfused[0], rtol=0, atol=0)
    for parameter, gradient in fused[1].items():
        if name in ("swiglu", "block") and not parameter.endswith(ABOVE_SHARED_INPUT):
            # Gate and up have one dgrad, rounded once; then steps of e5m2 where a gradient is quantized below.
            assert relative(gradient, unfused[1][parameter]) < 5e-2, parameter
            continue
        summed = "bias" in parameter  # the fused bias gradient is summed tile by tile
        tolerance = {"rtol": 1.6e-2, "atol": 1e-2} if summed else {"rtol": 0, "atol": 0}
        torch.testing.assert_close(gradient, unfused[1][parameter], **tolerance)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_inductor_computes_what_the_graphs_say(name: str, dtype: torch.dtype) -> None:
    model, x = build(name, dtype), rows(48, dtype)
    through_inductor = step(compiled(model), x)
    as_they_are = step(compiled(model, codegen="eager"), x)
    exact = step(model, x)
    # Inductor rounds the norms' and residuals' sums differently, which moves single FP8 values.
    assert relative(through_inductor[0], as_they_are[0]) < 5e-3
    assert 0 < relative(through_inductor[0], exact[0]) < 0.08
    for parameter, gradient in through_inductor[1].items():
        assert relative(gradient, as_they_are[1][parameter]) < 5e-2, parameter
        assert relative(gradient, exact[1][parameter]) < 0.15, parameter


def test_inductors_code_launches_kernels_without_a_dispatcher_call() -> None:
    from torch._inductor.utils import run_and_get_code

    with torch._inductor.config.patch(force_disable_caches=True):
        _, codes = run_and_get_code(step, compiled(build("gelu")), rows(64))
    source = "\n".join(codes)
    assert "torch.ops.te" not in source
    for kernel in ("gemm_kernel", "norm_cast_kernel", "produce_write_kernel", "quantize_cast_kernel"):
        assert re.search(rf"{kernel}_\d+\.run\(", source), kernel


def test_every_operation_is_lowered_to_triton() -> None:
    explanation = te_dynamo.explain(build("block"), rows(64), options={"codegen": "inductor"})
    assert explanation.coverage == 1.0
    lowered = explanation.to_dict()["lowered"]
    assert lowered and all("reference" not in str(row) for row in lowered), lowered


def test_dynamic_rows_compile_once() -> None:
    model = build("gelu")
    dynamic = compiled(model, dynamic=True)
    counts = (17, 64, 301)
    for index, count in enumerate(counts):
        x = rows(count)
        with torch._dynamo.config.patch(error_on_recompile=index > 0):
            y, gradients = step(dynamic, x)
        exact = step(model, x)
        assert relative(y, exact[0]) < 0.08
        assert max(relative(gradients[name], exact[1][name]) for name in gradients) < 0.15


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_modes_give_the_same_numbers(mode: str) -> None:
    model, x = build("swiglu"), rows(64)
    plain, special = compiled(model), compiled(model, mode=mode)
    expected = step(plain, x)
    for _ in range(3):  # CUDA graphs are recorded on the second call and replayed on the third
        y, gradients = step(special, x)
    torch.testing.assert_close(y, expected[0], rtol=0, atol=0)
    assert max(relative(gradients[name], expected[1][name]) for name in gradients) < 1e-2


def test_autocast_over_fp32_weights() -> None:
    model, x = build("gelu", torch.float32), rows(64, torch.float32)

    def under_autocast(module: nn.Module) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        with torch.autocast("cuda", torch.bfloat16):
            return step(module, x)

    y, gradients = under_autocast(compiled(model))
    expected = under_autocast(model)
    assert 0 < relative(y, expected[0]) < 0.08
    assert max(relative(gradients[name], expected[1][name]) for name in gradients) < 0.15


@pytest.mark.parametrize("count", [1, 16, 64])
def test_inference_of_few_rows(count: int) -> None:
    model, x = build("block"), rows(count)
    with torch.inference_mode():
        y = compiled(model)(x)
        assert 0 < relative(y, model(x)) < 0.08


def test_checkpointed_layers() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = build("swiglu"), build("gelu")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = torch.utils.checkpoint.checkpoint(self.first, x, use_reentrant=False)
            return F.relu(self.second(h))

    model, x = Checkpointed(), rows(48)
    y, gradients = step(compiled(model), x)
    expected = step(model, x)
    assert 0 < relative(y, expected[0]) < 0.08
    assert max(relative(gradients[name], expected[1][name]) for name in gradients) < 0.15
