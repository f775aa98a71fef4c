"""Kept weights that forward itself writes, or whose copies it writes: they are quantized in each call, as docs/weights.md says."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from helpers.slow import slow_but
from helpers.weights.kept_weights import STEP, te
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import te_dynamo

_library = torch.library.Library("te_dynamo_written_weights", "DEF")
_library.define("shrink(Tensor x, Tensor(a!) weight) -> Tensor")
_library.impl("shrink", lambda x, weight: weight.mul_(0.25).clone(), "CompositeExplicitAutograd")


@torch._dynamo.allow_in_graph
def shrink(weight: Tensor) -> Tensor:
    return weight.mul_(0.25)


class Tied(nn.Module):
    """A head that shares its weight with an embedding that renormalizes the rows that it looks up."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(128, 64, max_norm=1.0)
        self.head = nn.Linear(64, 128, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, i: Tensor) -> Tensor:
        return self.head(self.embed(i))


class Written(nn.Module):
    def __init__(self, forward: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64))
        self.experts = nn.ParameterList(nn.Parameter(torch.randn(64, 64)) for _ in range(2))
        self.register_buffer("added", torch.randn(64, 64))
        self._forward = forward

    def forward(self, x: Tensor) -> Tensor:
        return self._forward(self, x)


def by_packet(s, x):
    torch.ops.te_dynamo_written_weights.shrink(x, s.weight)
    return F.linear(x, s.weight)


def by_unknown(s, x):
    shrink(s.weight)
    return F.linear(x, s.weight)


def a_cast(s, x):
    w = s.weight.to(torch.bfloat16)
    w.mul_(0.25)
    return F.linear(x.bfloat16(), w)


def a_cast_through_a_view(s, x):
    w = s.weight.to(torch.bfloat16)
    w.view(-1)[:1024].mul_(-4)
    return F.linear(x.bfloat16(), w)


def a_cast_of_a_cast(s, x):
    w = s.weight.to(torch.bfloat16)
    y = F.linear(x.bfloat16(), w)
    w.add_(s.added.bfloat16())
    return y + F.linear(x.bfloat16(), w)


def a_stack(s, x):
    w = torch.stack(list(s.experts))
    w.mul_(0.25)
    return F.grouped_mm(x.bfloat16(), w.bfloat16().transpose(1, 2), offs=torch.tensor([8, 16], dtype=torch.int32))


def in_a_body(s, x):
    def body(x):
        w = s.weight.to(torch.bfloat16)
        w.mul_(0.25)
        return F.linear(x.bfloat16(), w)

    return checkpoint(body, x, use_reentrant=False)


def a_body_after_a_write(s, x):
    s.weight.view(-1)[:2048].mul_(0.5)
    return checkpoint(lambda x: F.linear(x, s.weight), x, use_reentrant=False)


WRITTEN = [
    by_packet,
    by_unknown,
    a_cast,
    a_cast_through_a_view,
    a_cast_of_a_cast,
    a_stack,
    in_a_body,
    a_body_after_a_write,
]


MAKES: dict[str, Callable[[], nn.Module]] = {
    "tied": Tied,
    **{f.__name__: functools.partial(Written, f) for f in WRITTEN},
}


@pytest.mark.parametrize(
    ("name", "kept"), [*((name, "step") for name in MAKES), *slow_but(3, [(name, "frozen") for name in MAKES])]
)
def test_a_kept_weight_that_forward_writes(name: str, kept: str) -> None:
    """The bits of a model that keeps nothing, in each of two calls. The slow ones find a write that freezing alone overlooks."""
    make = MAKES[name]
    x = torch.randint(0, 128, (16,)) if make is Tied else torch.randn(16, 64)
    results = []
    for options in ({}, STEP if kept == "step" else {}):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = make()
        if results and kept == "frozen":
            te_dynamo.freeze(model)
        compiled = te(model, **options)
        with torch.no_grad():
            results.append([compiled(x).clone(), compiled(x).clone()])
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)


def test_training_with_a_tied_embedding_is_as_without_a_cache() -> None:
    losses = []
    for options in ({}, STEP):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model, i = Tied(), torch.randint(0, 128, (16,))
        compiled, optimizer = te(model, **options), torch.optim.SGD(model.parameters(), lr=1.0)
        losses.append([])
        for _ in range(3):
            loss = F.cross_entropy(compiled(i), i)
            losses[-1].append(loss.item())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert losses[0] == losses[1]
