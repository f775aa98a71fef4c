"""Linears whose N is no multiple of 16: padded where that wastes little, with the numbers and gradients of the unpadded."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import te_dynamo
from te_dynamo.passes.torch_ir.match.patterns.linears.padding import padding

EAGER = {"codegen": "eager"}


class Head(nn.Module):
    """A head of 1009 columns behind a linear."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.up, self.head = nn.Linear(64, 64), nn.Linear(64, 1009, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.gelu(self.up(x)))


class Transposed(Head):
    """The same, the weight stored as [K, N]."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 1009) / 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x) @ self.weight


class Flat(Head):
    """A view across the rows, which the longer rows do not have."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).view(-1) * 2.0


class Inner(nn.Module):
    """K = 106 and then, as [K, N], 196: TabTransformer's and Mixer's."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(106, 196), nn.Parameter(torch.randn(196, 64) / 14)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.up(F.pad(x, (0, 42)))) @ self.down


def test_what_is_padded() -> None:
    assert [padding(n, 16) for n in (50257, 30522, 51865, 3352, 1024)] == [15, 6, 7, 8, 0]
    assert [padding(k, 16) for k in (479, 424, 196, 106)] == [1, 8, 12, 6]
    assert padding(8, 16) == padding(100, 16) == 0, "more than a sixteenth"


@pytest.mark.parametrize("model", [Head, Transposed, Flat, lambda: Head(bias=False), Inner])
def test_numbers_are_those_of_a_padded_model(model) -> None:
    torch.manual_seed(0)
    module = model().bfloat16()
    x = torch.randn(4, 32, 64, dtype=torch.bfloat16, requires_grad=True)
    expected = module(x)
    grad = torch.randn_like(expected)
    expected.backward(grad)
    gradients = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    module.zero_grad()
    with te_dynamo.capture() as graphs:
        actual = torch.compile(module, backend="te", options=EAGER)(x)
        actual.backward(grad)
    assert graphs["match"].count("te.linear(") == 2 and "torch.cat(" in graphs["match"]
    assert actual.shape == expected.shape and (actual - expected).norm() < 0.1 * expected.norm()
    for name, gradient in gradients.items():
        other = module.get_parameter(name).grad
        assert other is not None and other.shape == gradient.shape and other.is_contiguous()
        assert (other - gradient).norm() < 0.15 * gradient.norm(), name


def test_the_rows_say_the_users_sizes_and_few_columns_are_left() -> None:
    class Router(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head, self.router = nn.Linear(64, 1009), nn.Linear(64, 24)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x).sum() + self.router(x).sum()

    rows = te_dynamo.explain(Router(), torch.randn(32, 64), options=EAGER).linears
    assert [(row.module, row.matched, row.shape[1]) for row in rows] == [
        ("head", True, "1009"),
        ("router", False, "24"),
    ]
    assert rows[1].reason == (
        "N = 24, K = 64: FP8 GEMMs need N and K to be multiples of 16; padding N to 32 would add 33%, more than 1/16"
    )


def test_a_frozen_head_is_quantized_in_each_call() -> None:
    module = Head().bfloat16()
    x = torch.randn(32, 64, dtype=torch.bfloat16)
    run = torch.compile(module, backend="te", options=EAGER)
    with torch.no_grad():
        expected = run(x)
        te_dynamo.freeze(module, drop_weights=True)
        assert torch.equal(run(x), expected)
