"""The four small models of the graph snapshots and the fuser's tests, and how their graphs are taken.

Hidden size 64, feed-forward size 128, two heads. Each takes x[rows, 64], the block x[batch, sequence, 64].
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from te_dynamo import capture
from te_dynamo.inspect.graphs.capture import Captured
from te_dynamo.kernels.runtime import availability
from te_dynamo.lowering.extern import gemm as extern_gemm
from te_dynamo.testing import capture_on_fake_cuda

HIDDEN, FFN, HEADS = 64, 128, 2


class GeluMLP(nn.Module):
    """LayerNorm, linear, GELU, linear; biases everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.fc1 = nn.Linear(HIDDEN, FFN)
        self.fc2 = nn.Linear(FFN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(self.norm(x))))


class SwigluMLP(nn.Module):
    """RMSNorm, gate and up, silu(gate) * up, down; no bias, as in Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(HIDDEN, eps=1e-5)
        self.gate = nn.Linear(HIDDEN, FFN, bias=False)
        self.up = nn.Linear(HIDDEN, FFN, bias=False)
        self.down = nn.Linear(FFN, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return self.down(F.silu(self.gate(h)) * self.up(h))


class SharedNorm(nn.Module):
    """q, k and v read one RMSNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(HIDDEN, eps=1e-5)
        self.q, self.k, self.v = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = self.norm(x)
        return self.q(h), self.k(h), self.v(h)


class Attention(nn.Module):
    """Causal self-attention behind an RMSNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = SharedNorm()
        self.o = nn.Linear(HIDDEN, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        heads = (t.unflatten(-1, (HEADS, HIDDEN // HEADS)).transpose(1, 2) for t in self.qkv(x))
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        return self.o(mixed.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    """A transformer block: attention and a SwiGLU MLP, each with its residual."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.mlp = SwigluMLP()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        return x + self.mlp(x)


MODELS: dict[str, type[nn.Module]] = {"gelu": GeluMLP, "swiglu": SwigluMLP, "qkv": SharedNorm, "block": Block}


def shape_for(model: type[nn.Module], rows: int) -> tuple[int, ...]:
    """The input's shape: [rows, hidden], for the block [1, rows, hidden]."""
    return (1, rows, HIDDEN) if model is Block else (rows, HIDDEN)


def capture_training(
    model: type[nn.Module], shape: Sequence[int], device: str, dtype: torch.dtype = torch.bfloat16, **options: Any
) -> Captured:
    """The graphs of `model` compiled for training on "cpu", or on fake "cuda"; the input requires grad."""
    return _capture(model, shape, device, dtype, True, options)


def capture_inference(
    model: type[nn.Module], shape: Sequence[int], device: str, dtype: torch.dtype = torch.bfloat16, **options: Any
) -> Captured:
    """The graphs of `model` compiled under torch.no_grad()."""
    return _capture(model, shape, device, dtype, False, options)


def _capture(
    model: type[nn.Module],
    shape: Sequence[int],
    device: str,
    dtype: torch.dtype,
    backward: bool,
    options: dict[str, Any],
) -> Captured:
    options = {"codegen": "eager", **options}
    torch._dynamo.reset()
    if device == "cuda":
        return capture_on_fake_cuda(
            lambda: model().to(dtype),
            lambda device: (torch.empty(*shape, dtype=dtype, device=device, requires_grad=backward),),
            backward=backward,
            options=options,
        )
    run = compiled_run(model, options)
    with capture() as graphs:
        run(torch.randn(*shape, dtype=dtype), backward)
    return graphs


@dataclasses.dataclass
class Result:
    """What one forward (and backward) computed."""

    outputs: list[Tensor]
    gradients: dict[str, Tensor]


def compiled_run(model: type[nn.Module], options: dict[str, Any]) -> Callable[..., Result]:
    """run(x, backward): a freshly compiled `model` with the same weights each time, on a copy of x."""

    def run(x: Tensor, backward: bool = True) -> Result:
        torch._dynamo.reset()
        torch.manual_seed(0)
        module = model().to(x.dtype)
        x = x.detach().clone().requires_grad_(backward)
        with torch.set_grad_enabled(backward):
            outputs = list(torch.utils._pytree.tree_leaves(torch.compile(module, backend="te", options=options)(x)))
        if not backward:
            return Result(outputs, {})
        torch.manual_seed(1)
        torch.autograd.backward(outputs, [torch.randn_like(out) for out in outputs])
        gradients = {name: parameter.grad for name, parameter in module.named_parameters()} | {"x": x.grad}
        missing = [name for name, gradient in gradients.items() if gradient is None]
        assert not missing, f"no gradient for {missing}"
        return Result(outputs, gradients)  # type: ignore[arg-type]

    return run


def snapshot(model: type[nn.Module], shape: Sequence[int], device: str, **options: Any) -> dict[str, str]:
    """{stage: text} of every stage of training, and of "inference"."""
    training = capture_training(model, shape, device, **options)
    inference = capture_inference(model, shape, device, **options)
    texts = {stage: training[stage] for stage in training.stages}
    return texts | {stage: inference[stage] for stage in inference.stages if "inference" in stage}


@contextlib.contextmanager
def kernels_everywhere() -> Iterator[None]:
    """Inside, the package takes every device for one with kernels: what lowering writes for a GPU shows without one."""
    with mock.patch.object(availability, "kernels_available", lambda device: availability.Availability(True)):
        yield


def calls_to_gemms_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """From then on Inductor's code calls the specialized GEMMs by name on every device. All other operations stay what they are there."""
    extern_gemm.register()
    everywhere = SimpleNamespace(kernels_available=lambda device: availability.Availability(True))
    monkeypatch.setattr(extern_gemm, "availability", everywhere)


def launches(text: str) -> str:
    """Of a graph's text a line for each Triton launch: the kernel, and the arguments that it writes.

    Grids, tile sizes and the other arguments are left out: they belong to the kernels, and change with them.
    """
    found = re.findall(r"^(?:\S+: )?\{(.*)\} = triton\.(\w+)\[", text, re.MULTILINE)
    names = [(kernel, ", ".join(re.findall(r"(\w+): ", written))) for written, kernel in found]
    return "\n".join(f"{kernel} -> {written}" for kernel, written in names)
