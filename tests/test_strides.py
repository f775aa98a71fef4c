"""Inputs that are not contiguous: a ViT's patches (flatten, transpose) are what its first norm reads."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from snapshot_models import kernels_everywhere
from torch import nn

import te_dynamo
from te_dynamo.testing import capture_on_fake_cuda

WIDTH = 32
PRODUCERS = {
    "rms_norm": lambda x: F.rms_norm(x, (WIDTH,)),
    "layer_norm": lambda x: F.layer_norm(x, (WIDTH,)),
    "gelu": F.gelu,
    "swiglu": lambda x: F.silu(x) * x.cos(),
}


class Model(nn.Module):
    """The linear of what a producer makes of a transposed x."""

    def __init__(self, producer):
        super().__init__()
        self.producer, self.fc = producer, nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.fc(self.producer(x.transpose(-1, -2)))


@pytest.mark.parametrize(
    "options",
    [
        {"codegen": "eager"},
        pytest.param({"fusions": False}, marks=pytest.mark.slow),
        pytest.param({}, marks=pytest.mark.slow),
    ],
    ids=["eager", "unfused", "inductor"],
)
@pytest.mark.parametrize("producer", PRODUCERS)
def test_a_transposed_input(producer, options):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Model(PRODUCERS[producer])
    x = torch.randn(WIDTH, 16, requires_grad=True)
    tensors = [x, *model.parameters()]
    expected = torch.autograd.grad(model(x).square().mean(), tensors)
    with te_dynamo.capture() as graphs:
        y = torch.compile(model, backend="te", options=options)(x)
        actual = torch.autograd.grad(y.square().mean(), tensors)
    assert f"te.{producer}" in graphs["match"]
    torch.testing.assert_close(y, model(x), rtol=0.125, atol=0.0675)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0.125, atol=0.0675)


@pytest.mark.slow
@pytest.mark.parametrize("producer", PRODUCERS)
def test_what_a_gpu_runs(producer):
    with kernels_everywhere():
        graphs = capture_on_fake_cuda(
            lambda: Model(PRODUCERS[producer]).bfloat16(),
            lambda device: (torch.empty(2, WIDTH, 16, dtype=torch.bfloat16, device=device, requires_grad=True),),
        )
    assert "_kernel[" in graphs["lower.forward"] and "_kernel[" in graphs["lower.backward"]


def test_operations_give_contiguous_results():
    x = torch.randn(WIDTH, 16).t()
    for result in (
        torch.ops.te.activation(x, "gelu"),
        torch.ops.te.swiglu(x, x),
        torch.ops.te.rms_norm(x, None, 1e-5, False, False)[0],
    ):
        assert result.is_contiguous()
