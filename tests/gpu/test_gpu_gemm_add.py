"""The GEMM that adds, in models on a GPU: the bits of a GEMM and an addition, by launches of Inductor's and by calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.kernels.kernel_cases import gpu, needs_cuda
from torch import Tensor, nn

import te_dynamo

pytestmark = [gpu, needs_cuda]


class Residual(nn.Module):
    """Three biased linears of one input, whose gradients are added up, and a residual sum that is the output."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.o(torch.tanh(self.q(x)) * self.k(x) + self.v(x))


def step(rows: int, width: int, mode: str | None = None, **options: Any) -> dict[str, Tensor]:
    """Output and gradients of one step, the same weights and inputs each time."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = Residual(width).to("cuda", torch.bfloat16)
    x = torch.randn(2, rows // 2, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    y = te_dynamo.compile(module, mode=mode, **options)(x)
    y.backward(torch.randn_like(y))
    found: dict[str, Any] = {name: parameter.grad for name, parameter in module.named_parameters()}
    return found | {"y": y.detach(), "x": x.grad, "input": x.detach()}


SIZES = [(512, 256), (4096, 4096)]


@pytest.mark.parametrize(("rows", "width"), SIZES)
def test_the_bits_are_those_of_the_operations_apart(rows: int, width: int) -> None:
    fused = step(rows, width, codegen="eager")
    for name, value in step(rows, width, codegen="eager", fusions=["-fuse_gemm_add"]).items():
        assert torch.equal(fused[name], value), name


@pytest.mark.parametrize(("rows", "width"), SIZES)
@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_inductors_code(rows: int, width: int, mode: str | None) -> None:
    """Its own kernels round a sum of three once where the products are apart: the gradient of x differs by that."""
    from torch._inductor.utils import run_and_get_code

    with torch._inductor.config.patch(force_disable_caches=True):
        # Apart from each other: as one GEMM, the linears of one input leave no sum of gradients.
        expected = step(rows, width, fusions=["-fuse_gemm_add", "-fuse_shared_input"])
        found, code = run_and_get_code(step, rows, width, mode, fusions=["-fuse_shared_input"])
    for name, value in found.items():
        error = (value.float() - expected[name].float()).norm() / expected[name].float().norm()
        assert error < 1e-2, (name, float(error))
    assert torch.equal(found["y"], expected["y"])
    calls = [line for text in code for line in text.splitlines() if "adds=True" in line]
    assert len(calls) == (4 if width == 4096 else 0), (
        "the residual's, and those of x's gradient: its own and three linears'"
    )
    in_place = [line for line in calls if line.split("out=")[1].rstrip(")") in line.split("out=")[0]]
    assert len(in_place) == (2 if calls else 0), "the sums of what the graph has made"


def test_code_in_cpp_calls_launches() -> None:
    expected = step(4096, 4096)
    with torch._inductor.config.patch(cpp_wrapper=True, force_disable_caches=True):
        found = step(4096, 4096)
    assert torch.equal(found["y"], expected["y"])
