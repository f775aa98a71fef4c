"""`explain` leaves a model as it was that changes itself when it is first called, as those of compressed-tensors do."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn

import te_dynamo


class Offloaded(MutableMapping):
    """A library's own registry of parameters: a tensor that is put where one of its size is is copied into that."""

    def __init__(self, held: dict[str, Any]) -> None:
        self.held = dict(held)

    def __getitem__(self, name: str) -> Any:
        tensor = self.held[name]
        return tensor if tensor is None else tensor.to("cpu")  # as data that has gone meta cannot

    def __setitem__(self, name: str, value: Any) -> None:
        there = self.held.get(name)
        if there is not None and value is not None and there.shape == value.shape:
            with torch.no_grad():
                there.copy_(value)
        else:
            self.held[name] = value

    def __delitem__(self, name: str) -> None:
        del self.held[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.held)

    def __len__(self) -> int:
        return len(self.held)


class Compressed(nn.Linear):
    """Codes and a scale until the first call; a forward that exchanges the weight's data."""

    compressed = True

    def __init__(self) -> None:
        super().__init__(64, 64, bias=False, dtype=torch.bfloat16)
        self.weight = nn.Parameter(self.weight.data.to(torch.float8_e4m3fn), requires_grad=False)
        self.register_buffer("weight_scale", torch.ones(1))

    @torch.compiler.disable
    def decompress(self) -> None:
        if self.compressed:
            self.weight = nn.Parameter(self.weight.data.bfloat16() * self.weight_scale.bfloat16(), requires_grad=False)
            self._parameters = Offloaded(self._parameters)  # type: ignore[assignment]
            self.compressed = False

    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        self.decompress()
        weight = self.weight
        held = weight.data
        weight.data = held + 0
        try:
            return nn.functional.linear(x, weight)
        finally:
            weight.data = held


def test_a_model_that_decompresses_itself() -> None:
    model, x = (
        nn.Sequential(Compressed(), nn.Linear(64, 64).bfloat16()).requires_grad_(False),
        torch.ones(8, 64).bfloat16(),
    )
    parameters = [*model.parameters()]
    for _ in range(2):
        explained = te_dynamo.explain(model, x)
        assert len(explained.linears) == 2
        assert model[0].compressed and type(model[0]._parameters) is dict
        assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    model(x)
    after = model[0].weight.clone()
    te_dynamo.explain(model, x)
    assert type(model[0]._parameters) is Offloaded and torch.equal(model[0].weight, after)


def test_a_lazy_module_with_buffers() -> None:
    explained = te_dynamo.explain(nn.Sequential(nn.LazyLinear(64), nn.LazyBatchNorm1d()), torch.randn(8, 64))
    assert [linear.matched for linear in explained.linears] == [True]


@dataclasses.dataclass
class Output:
    hidden: Tensor


class ReturnsAnObject(nn.Linear):
    def forward(self, x: Tensor) -> Output:  # type: ignore[override]
        return Output(super().forward(x))


def test_backward_of_what_a_model_returns_in_an_object() -> None:
    assert "backward" in te_dynamo.explain(ReturnsAnObject(64, 64), torch.randn(8, 64)).graphs.stages


def test_a_function_that_trains() -> None:
    """It runs backward and drops the gradients itself."""
    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)

    def step(x: Tensor) -> Tensor:
        loss = model(x).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    assert [linear.matched for linear in te_dynamo.explain(step, torch.randn(8, 64)).linears] == [True]
