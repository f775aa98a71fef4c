"""How an operation runs: which of its two implementations, where, and what its kernels are given."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

from te_dynamo.dialect.define import kernel_or_reference
from te_dynamo.dialect.gemm import Gemm
from te_dynamo.errors import UnsupportedError
from te_dynamo.kernels.runtime import availability
from te_dynamo.nn import Linear
from te_dynamo.recipe import Float8CurrentScaling


class OnGPU(torch.Tensor):
    device: Any = None


@pytest.mark.parametrize(("of", "current", "expected"), [(1, 0, [1]), (1, 1, []), (0, 0, [])])
def test_kernels_are_launched_on_the_device_of_their_tensors(
    of: int, current: int, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    entered: list[int] = []

    @contextlib.contextmanager
    def entering(device: Any) -> Iterator[None]:
        entered.append(device.index)
        yield

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    monkeypatch.setattr(torch.cuda, "device", entering)
    monkeypatch.setattr(availability, "kernels_available", lambda _: availability.Availability(True))
    monkeypatch.setattr(OnGPU, "device", torch.device("cuda", of))
    assert kernel_or_reference(lambda x: "kernel", lambda x: "reference")(torch.empty(1).as_subclass(OnGPU)) == "kernel"
    assert entered == expected


def test_a_products_bias_is_one_value_after_the_other() -> None:
    quantizer = Float8CurrentScaling().input_quantizer()
    operands = [torch.empty(32, 64, dtype=torch.float8_e4m3fn), torch.ones(1)]
    for bias in (torch.randn(32, 3)[:, 1], torch.randn(1).expand(32)):
        given = Gemm(operands, quantizer, operands, quantizer, torch.bfloat16, True, bias).request().bias
        assert given is not None and given.is_contiguous() and torch.equal(given, bias)


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_a_tangent_is_refused_not_lost(backend: str | None) -> None:
    linear = Linear(32, 32).requires_grad_(False)
    called: Any = torch.compile(linear, backend=backend) if backend else linear
    x = torch.randn(16, 32)
    called(x)
    with pytest.raises(UnsupportedError, match="te::linear has no forward-mode derivative"):
        torch.func.jvp(called, (x,), (x,))
    with forward_ad.dual_level(), pytest.raises(UnsupportedError, match="has no forward-mode derivative"):
        called(forward_ad.make_dual(x, x))
