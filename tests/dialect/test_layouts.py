"""Tensors whose memory is not in order, and of one dimension: what torch's own operations take, te operations take or leave."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from helpers.graphs.matching import Matched
from helpers.models.snapshot_models import kernels_everywhere
from helpers.slow import slow_but
from torch import Tensor, nn

from te_dynamo.testing import capture_on_fake_cuda

torch.manual_seed(0)
WEIGHT = torch.randn(32, 32)


def written_rms_norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)


PRODUCERS: dict[str, Callable[[Tensor], Tensor]] = {
    "layer_norm": lambda x: F.layer_norm(x, (32,), WEIGHT[0], WEIGHT[1]),
    "rms_norm": lambda x: F.rms_norm(x, (32,), WEIGHT[0]),
    "written rms_norm": lambda x: WEIGHT[0] * written_rms_norm(x),
    "gelu": F.gelu,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "silu": F.silu,
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "swiglu": lambda x: F.silu(x) * x.cos(),
}


def trains_as_written(forward: Callable[[Tensor], Tensor], x: Tensor, codegen: str = "eager") -> None:
    torch._dynamo.reset()
    actual, expected = x.detach().requires_grad_(), x.detach().requires_grad_()
    assert actual.stride() == x.stride()
    y = torch.compile(forward, backend="te", options={"codegen": codegen})(actual)
    y.square().sum().backward()
    (reference := forward(expected)).square().sum().backward()
    assert 0 < (y - reference).norm() / reference.norm() < 0.1
    assert 0 < (actual.grad - expected.grad).norm() / expected.grad.norm() < 0.15


INPUTS = {"2d": torch.randn(32, 24).t(), "3d": torch.randn(2, 32, 12).mT, "1d": torch.randn(32)}


@pytest.mark.parametrize(
    ("x", "producer"),
    [
        *(("3d", producer) for producer in PRODUCERS),
        *slow_but(4, [(x, producer) for x in ("2d", "1d") for producer in PRODUCERS]),
    ],
)
def test_input(x: str, producer: str) -> None:
    """A transposed input, and one token without a batch. The slow ones find a kernel that takes these for rows of a batch."""
    trains_as_written(lambda x: F.linear(PRODUCERS[producer](x), WEIGHT), INPUTS[x])


@pytest.mark.one_fast_case
@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
def test_one_token(norm: Callable[[int], nn.Module]) -> None:
    """The gradients of a norm's weight and bias, where there are no rows to add up."""
    model, x = nn.Sequential(norm(32), nn.Linear(32, 32)), torch.randn(32)
    trains_as_written(model, x)
    torch._dynamo.reset()
    model.zero_grad()
    torch.compile(model, backend="te", options={"codegen": "eager"})(x).sum().backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model(x).sum().backward()
    for actual, parameter in zip(gradients, model.parameters(), strict=True):
        assert (actual - parameter.grad).norm() < 0.1 * parameter.grad.norm()


@pytest.mark.slow
@pytest.mark.parametrize("producer", PRODUCERS)
def test_input_through_inductor(producer: str) -> None:
    trains_as_written(lambda x: F.linear(PRODUCERS[producer](x), WEIGHT), torch.randn(2, 32, 12).mT, "inductor")


@pytest.mark.parametrize("producer", PRODUCERS)
def test_strides_that_the_model_relies_on(producer: str) -> None:
    """Channels are last for the linear and first again for the view, without a copy in between."""

    def forward(x: Tensor) -> Tensor:
        last = PRODUCERS[producer](x.permute(0, 2, 3, 1))
        first = last.permute(0, 3, 1, 2)
        rows = first.view(2, 384) if first.is_contiguous() else first.flatten(1)
        return F.linear(last, WEIGHT).mean((1, 2)) + rows[:, :32]

    trains_as_written(forward, torch.randn(2, 32, 3, 4))


class Interleaved(nn.Module):
    """gate and up are every other column."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up, self.down = nn.Linear(32, 128, bias=False), nn.Linear(64, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.gate_up(x)
        return self.down(F.silu(h[..., ::2]) * h[..., 1::2])


def test_interleaved_gate_and_up() -> None:
    compiled, x = Matched(Interleaved(), run="aot"), torch.randn(4, 32)
    torch.testing.assert_close(compiled(x), compiled.module(x))
    (reason,) = compiled.reasons("gated silu")
    assert (
        reason == "its gate's strides are [128, 2]; te.gated reads rows whose values lie side by side; left to Inductor"
    )


@pytest.mark.parametrize("model", [Interleaved])
def test_compiles_for_cuda(model: Callable[[], nn.Module]) -> None:
    with kernels_everywhere():
        capture_on_fake_cuda(
            lambda: model().bfloat16(), lambda device: (torch.empty(16, 32, dtype=torch.bfloat16, device=device),)
        )


@pytest.mark.slow
@pytest.mark.parametrize("producer", ["rms_norm", "layer_norm", "gelu"])
def test_kernels_read_a_transposed_input(producer: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.fc = nn.LayerNorm(32) if producer == "layer_norm" else nn.RMSNorm(32), nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            x = x.transpose(-1, -2)
            return self.fc(F.gelu(x) if producer == "gelu" else self.norm(x))

    with kernels_everywhere():
        graphs = capture_on_fake_cuda(
            lambda: Model().bfloat16(),
            lambda device: (torch.empty(2, 32, 16, dtype=torch.bfloat16, device=device, requires_grad=True),),
        )
    assert "_kernel[" in graphs["lower.forward"] and "_kernel[" in graphs["lower.backward"]


def test_operations_give_contiguous_results() -> None:
    x = torch.randn(32, 16).t()
    for result in (
        torch.ops.te.activation(x, "gelu"),
        torch.ops.te.gated(x, x, "gelu"),
        torch.ops.te.rms_norm(x, None, 1e-5, False, False)[0],
    ):
        assert result.is_contiguous()
