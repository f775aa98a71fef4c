"""Weights that are quantized one behind the other: which share a launch of amaxes, and with the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from helpers.graphs.lowered_graphs import BOTH, ROWS
from helpers.kernels.kernel_cases import assert_same_bits
from helpers.models.small_models import SwiGLU
from helpers.models.snapshot_models import kernels_everywhere
from helpers.weights.kept_weights import STEP, WIDTH, assert_same, block, te, tokens, train
from torch import Tensor

from te_dynamo.dialect import quantize as quantize_operations
from te_dynamo.errors import KeptWeightError
from te_dynamo.kernels.quantize.current import MOST_TENSORS
from te_dynamo.quantized.quantizers import MXFP8Quantizer
from te_dynamo.weights import quantize_together as module
from te_dynamo.weights.quantize_together import Values, quantize_together


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is called that launches kernels, in order, as on a GPU; an operation that finds its amaxes and casts is two of them."""
    called: list[str] = []

    def recorded(name: str) -> None:
        operation = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args: (called.append(name), operation(*args))[1])

    for name in ("amaxes", "quantize_tensor", "quantize_stacked", "quantize_with_amax", "quantize_stacked_with_amaxes"):
        recorded(name)
    return called


def one_by_one(several: list[Values]) -> list[list[Tensor]]:
    return [made for values in several for made in quantize_together([values])]


def weights(count: int, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    torch.manual_seed(0)
    return [(torch.randn(128, 64) * 9**i).to(dtype) for i in range(count)]


def test_a_step_finds_the_amaxes_of_all_weights_in_one_launch(launches: list[str]) -> None:
    model, x = block(), tokens()
    call, optimizer = te(model, **STEP, weight_cache_check=True), torch.optim.SGD(model.parameters(), lr=0.1)
    call(x).sum().backward()
    optimizer.step()
    launches.clear()
    with kernels_everywhere():
        call(x)
    assert sorted(launches) == ["amaxes", "quantize_stacked_with_amaxes", *["quantize_with_amax"] * 5]
    call(x)  # compares them with what is quantized one by one


def test_training_has_the_bits_it_has_without_the_cache(launches: list[str]) -> None:
    results = []
    for options in ({}, STEP):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = SwiGLU(WIDTH).bfloat16()
        call = te(model, **options)
        call(tokens())
        launches.clear()
        with kernels_everywhere():
            results.append(train(model, call, [tokens(), tokens() * 2], steps=3))
    assert launches.count("amaxes") == 2, "behind the first and the second step"
    for ours, theirs in zip(*results, strict=True):
        assert_same(ours, theirs)


def test_those_that_one_launch_takes_share_it(launches: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def sizes(several: list[Values]) -> list[int]:
        """The tensors of each launch of amaxes."""
        found: list[int] = []
        amaxes = quantize_operations.amaxes
        with (
            kernels_everywhere(),
            mock.patch.object(module, "amaxes", lambda xs: (found.append(len(xs)), amaxes(xs))[1]),
        ):
            together = list(quantize_together(several))
        for ours, theirs in zip(together, one_by_one(several), strict=True):
            assert_same_bits(ours, theirs)
        return found

    def each(values: list[Tensor], quantizer: object = BOTH) -> list[Values]:
        return [Values([value], quantizer) for value in values]  # type: ignore[arg-type]

    values = weights(MOST_TENSORS + 3)
    assert sizes(each(values)) == [MOST_TENSORS, 3]
    assert sizes([Values(values[:2], BOTH), *each(values[2:5])]) == [5]
    assert sizes([*each(values[:7]), Values(values[7:9], BOTH), *each(values[9:])]) == [7, 4], "a stack stays together"
    assert sizes([*each(values[:2]), *each(weights(2, torch.float32))]) == [2, 2]
    assert sizes(each(values[:2], ROWS)) == [], "of few values one launch does all"
    assert sizes(each(values[:2], MXFP8Quantizer())) == []
    assert sizes([]) == []
    monkeypatch.setattr(quantize_operations, "MOST_BYTES", 2 * values[0].nbytes)
    assert sizes(each(values[:5])) == [2, 2]


def test_values_and_buffers_are_made_no_earlier_than_they_are_asked_for(launches: list[str]) -> None:
    taken = []

    def values() -> Iterator[Values]:
        for value in weights(MOST_TENSORS + 3):
            taken.append(value)
            yield Values([value], BOTH)

    with kernels_everywhere():
        next(quantize_together(values()))
    assert len(taken) == MOST_TENSORS + 1 and launches == ["amaxes", "quantize_with_amax"]


def test_the_check_finds_an_amax_that_was_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, amaxes = SwiGLU(WIDTH).bfloat16(), tokens(), quantize_operations.amaxes
    call = te(model, **STEP, weight_cache_check=True)
    call(x)
    monkeypatch.setattr(module, "amaxes", lambda xs: amaxes(xs) * 2)
    with kernels_everywhere(), torch.no_grad():
        model.down.weight.mul_(2)
        model.up.weight.mul_(2)
        call(x)
        with pytest.raises(KeptWeightError):
            call(x)
