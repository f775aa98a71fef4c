"""`explain` leaves a model as it was that changes itself when it is called, as those of compressed-tensors do, and one that a function calls."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import te_dynamo
from te_dynamo.inspect import target


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


class Keeping(nn.Linear):
    """Keeps what it computed in lists."""

    def __init__(self) -> None:
        super().__init__(64, 64)
        self.kept: list[Tensor] = []
        self.by_name: dict[str, list[Tensor]] = {"y": []}

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.kept.append(y)
        self.by_name["y"].append(y)
        return y


def test_what_a_module_keeps_in_lists() -> None:
    model, x = Keeping(), torch.randn(8, 64)
    model(x)
    kept, by_name = [*model.kept], [*model.by_name["y"]]
    te_dynamo.explain(model, x)
    assert len(model.kept) == len(model.by_name["y"]) == 1
    assert model.kept[0] is kept[0] and model.by_name["y"][0] is by_name[0]


def test_what_a_long_list_holds_is_not_looked_into() -> None:
    """A tokenizer's, of hundreds of thousands: minutes."""
    model = nn.Linear(64, 64)
    model.merges = [[first, first + 1] for first in range(5000)]
    assert len(list(target._contents(model))) < 20
    assert target._named_by(model.merges) == {}


class Trainer:
    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64))

    def step(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return scale * self.model(x).square().sum()


def _closure(trainer: Trainer) -> Callable[..., Any]:
    layers = [*trainer.model]

    def inner(x: Tensor) -> Tensor:
        return layers[1](layers[0](x))

    return lambda x: inner(x).square().sum()


@pytest.mark.parametrize(
    "function",
    [
        _closure,
        lambda trainer: trainer.step,
        lambda trainer: trainer.model.forward,
        lambda trainer: functools.partial(trainer.step, scale=2.0),
    ],
)
def test_a_function_with_a_model(function: Callable[[Trainer], Any]) -> None:
    """Its buffers stay, its parameters have gradients, and it moves to another device."""
    trainer, x = Trainer(), torch.randn(8, 64)
    statistics = trainer.model[1].running_mean.clone()
    explained = te_dynamo.explain(function(trainer), x)
    assert torch.equal(trainer.model[1].running_mean, statistics) and trainer.model[1].num_batches_tracked == 0
    assert "backward" in explained.graphs.stages
    assert [linear.shape for linear in te_dynamo.explain(function(trainer), x, device="h200").linears] == [
        ("8", "64", "64")
    ]
    assert type(trainer.model[0].weight) is nn.Parameter and trainer.model[0].weight.device.type == "cpu"


class Hidden(nn.Module):
    """Keeps a module out of its state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(64)
        self.teacher = [nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64))]

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.teacher[0](x))


def test_a_module_in_a_list() -> None:
    model, x = Hidden(), torch.randn(8, 64)
    assert "backward" in te_dynamo.explain(model, x).graphs.stages and model.teacher[0][1].num_batches_tracked == 0
    assert te_dynamo.explain(model, x, device="h200").linears[0].module == "teacher.0.0"
    assert "teacher.0.0.weight" in te_dynamo.compare(model, x).summary["gradients"]


def test_a_function_that_runs_backward_itself() -> None:
    model, x = nn.Linear(64, 64), torch.randn(8, 64)
    model.weight.grad = before = torch.ones(64, 64)

    def step(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        return loss

    assert "backward" in te_dynamo.explain(step, x).graphs.stages
    assert te_dynamo.compare(step, x).rows[0].output_snr_db is not None
    assert model.weight.grad is before and torch.equal(before, torch.ones(64, 64)) and model.bias.grad is None


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
