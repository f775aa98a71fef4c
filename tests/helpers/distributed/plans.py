"""What several ranks are compared to: one process with the same tokens, and the same shards."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.distributed.rank_bodies import batch, loss_of, model, rows_of, sequential, step
from helpers.distributed.ranks import SIZE
from helpers.oracles.fp8_oracle import fp8_linears, relative_error
from torch.overrides import TorchFunctionMode


def one_process(
    parts: int,
    steps: int = 1,
    skip: str = "",
    outside: Any = contextlib.nullcontext,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Any]:
    """The same training without ranks and without the package: FP8 by the oracle.

    parts: of the batch, each with amaxes of its own. skip: what the names of linears hold that stay in their precision.
    outside: a mode below which the oracle is. dtype: what the weights are rounded to; all else is fp32.
    """
    plain, losses, gradients = model(dtype).float(), [], {}
    left = tuple(p for name, p in plain.named_parameters() if skip in name) if skip else ()
    for number in range(steps):
        plain.zero_grad()
        total = 0.0
        for ids, wanted in zip(*(tensor.chunk(parts) for tensor in batch()), strict=True):
            with fp8_linears(skip=left), outside(plain) if outside is not contextlib.nullcontext else outside():
                loss = loss_of(plain, ids, wanted) / parts
                loss.backward()
            total += loss.item()
        losses.append(total)
        if number == 0:
            gradients = {name: p.grad.clone() for name, p in plain.named_parameters()}
        step(plain.parameters())
    return {"losses": losses, "gradients": gradients}


def assert_trained_as(
    both: list[dict[str, Any]], expected: dict[str, Any], bound: float, of_losses: float | None = None
) -> None:
    """bound: on the relative error of every gradient; of the losses' mean a tenth of it, if not given."""
    losses = [sum(each) / len(both) for each in zip(*(one["losses"] for one in both), strict=True)]
    assert losses == pytest.approx(expected["losses"], rel=bound / 10 if of_losses is None else of_losses)
    for one in both:
        assert one["gradients"].keys() == expected["gradients"].keys()
        for name, gradient in one["gradients"].items():
            error = relative_error(gradient, expected["gradients"][name])
            assert error <= bound, f"{name}: {error}"


def names(paths: Iterable[str], prefix: str = "") -> list[tuple[str, str]]:
    """Records of linears that all run in the recipe."""
    return [(f"{prefix}{path}", "") for path in paths]


BLOCK = [*(f"parts.0.{name}" for name in "qkvo"), *(f"parts.1.{name}" for name in ("gate", "up", "down"))]

LAYERS = [f"layers.{i}.{name}" for i in range(2) for name in BLOCK]


class shares(TorchFunctionMode):
    """Inside, the linears of these names are what the ranks compute, one after another: each of its half of the weight."""

    def __init__(self, plain: torch.nn.Module, column: str = "[qkv]|gate|up|head", row: str = "o|down") -> None:
        super().__init__()
        self._ways = {
            id(p): way
            for name, p in plain.named_parameters()
            for way, pattern in (("column", column), ("row", row))
            if re.fullmatch(rf"(.*\.)?({pattern})\.weight", name)
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.linear or id(args[1]) not in self._ways:
            return func(*args, **(kwargs or {}))
        x, weight, bias = (*args, None)[:3]
        if self._ways[id(weight)] == "column":
            biases = [None] * SIZE if bias is None else bias.chunk(SIZE)
            return torch.cat([F.linear(x, w, b) for w, b in zip(weight.chunk(SIZE), biases, strict=True)], -1)
        parts = zip(x.chunk(SIZE, -1), weight.chunk(SIZE, 1), strict=True)
        y = sum(F.linear(part, w.contiguous()) for part, w in parts)
        return y if bias is None else y + bias


shares_of_blocks = functools.partial(shares, column="[qkv]|gate|up")

"""The head is in its own precision, where shares give what the whole gives."""


def assert_collectives(both: list[dict[str, Any]], bound: float) -> None:
    for case in both[0]:
        operation = case.partition(",")[0]
        first, _, last = sequential(operation).children()
        inputs = [rows_of(rank) for rank in range(SIZE)]
        hidden = [F.linear(x, first.weight) for x in inputs]
        whole = torch.cat(hidden) if operation == "AllGather" else hidden[0] + hidden[1]
        parts = whole.chunk(SIZE) if operation == "ReduceScatter" else [whole] * SIZE
        outputs = [F.linear(part, last.weight) for part in parts]
        # AllReduce's backward is for losses that are one: every process computes the same.
        loss = sum(y.square().sum() for y in (outputs[:1] if operation == "AllReduce" else outputs))
        gradients = torch.autograd.grad(loss, inputs)
        for rank, one in enumerate(both):
            for actual, wanted in zip(one[case], (outputs[rank], gradients[rank]), strict=True):
                error = relative_error(actual, wanted)
                assert error <= bound, (case, rank, error)
