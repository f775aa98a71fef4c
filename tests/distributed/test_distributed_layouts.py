"""Twenty steps in each layout, beside the same steps of one process in the same recipe."""

from __future__ import annotations

import pathlib
import signal
import time
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.distributed import layouts
from helpers.distributed.ranks import SIZE, Ranks

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")

STEPS = 20
LOSSES = 5e-3
"""What two roundings to FP8 may make of a loss: each rank has amaxes of its own tokens."""
COSINE = 0.98

CHECKPOINTS = ("ddp", "fsdp2", "pipeline", "experts")
"""torch 2.13 checkpoints no DTensors in a compiled block."""

ONE_GRAPH = ("ddp", "fsdp2", "fsdp2 in fp8", "pipeline")
"""Layouts whose layers share a compiled graph, so that each rank has one. In the others each layer is compiled, for seconds: two ranks
train one layer there, four ranks two."""


@pytest.fixture(scope="module")
def expected() -> dict[tuple[str, int, int], dict[str, Any]]:
    """(which model, of how many ranks and layers) -> what one process trains; made when it is first asked for."""
    return {}


def assert_trains(
    ranks: Ranks, size: int, layout: str, checkpoint: bool, expected: dict[Any, Any], layers: int | None = None
) -> None:
    which = "alone experts" if layout == "experts" else "alone"
    layers = layers or size  # a block a rank: a pipeline's stages
    if (which, size, layers) not in expected:
        expected[which, size, layers] = ranks.run(layouts.train, which, False, STEPS, None, layers, seconds=300)[0]
    alone = expected[which, size, layers]
    each = ranks.run(layouts.train, layout, checkpoint, STEPS, None, layers, seconds=300)
    told = [one["losses"] for one in each if one["losses"]]  # the last stage alone knows a pipeline's
    losses = [sum(of_step) / len(told) for of_step in zip(*told, strict=True)]
    assert losses == pytest.approx(alone["losses"], rel=LOSSES)
    assert losses[-1] < 0.8 * losses[0]
    assert {name for one in each for name in one["gradients"]} == alone["gradients"].keys()
    for one in each:
        for name, gradient in one["gradients"].items():
            wanted = alone["gradients"][name]
            cosine = F.cosine_similarity(gradient.float().flatten(), wanted.float().flatten(), 0)
            assert cosine > COSINE, f"{name}: {cosine}"
            assert 0.8 < gradient.norm() / wanted.norm() < 1.25, name
        after_two_steps, at_the_end = one["graphs"]
        assert after_two_steps == at_the_end, "compiled again"


@pytest.mark.slow
@pytest.mark.parametrize("layout", [name for name in layouts.LAYOUTS if not name.startswith("alone")])
def test_two_ranks(ranks: Ranks, expected: dict[Any, Any], layout: str) -> None:
    assert_trains(ranks, SIZE, layout, False, expected, layers=None if layout in ONE_GRAPH else 1)


@pytest.mark.slow
@pytest.mark.parametrize("layout", CHECKPOINTS)
def test_two_ranks_with_checkpoints(ranks: Ranks, expected: dict[Any, Any], layout: str) -> None:
    assert_trains(ranks, SIZE, layout, True, expected)


ON_FOUR = ("fsdp2 in fp8 x sequence", "pipeline", "experts")
"""Two by two of what is most involved; stages between the first and the last; experts that are sent to three others."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "checkpoint"),
    [
        pytest.param(name, checkpoint, marks=() if name in ON_FOUR and not checkpoint else pytest.mark.exhaustive)
        for name in layouts.LAYOUTS
        for checkpoint in (False, True)
        if not name.startswith("alone") and (name in CHECKPOINTS or not checkpoint)
    ],
)
def test_four_ranks(four_ranks: Ranks, expected: dict[Any, Any], layout: str, checkpoint: bool) -> None:
    assert_trains(four_ranks, 2 * SIZE, layout, checkpoint, expected, layers=None if layout in ONE_GRAPH else 2)


@pytest.mark.slow
def test_a_killed_rank_ends_the_others(tmp_path: pathlib.Path) -> None:
    """With torch's error: backward's all-gather has nobody to talk to."""
    start = time.monotonic()
    with Ranks(tmp_path) as ranks, pytest.raises(AssertionError) as raised:
        ranks.run(layouts.killed)
    first, second = str(raised.value).split("killed, rank 1:")
    assert "RuntimeError" in first and "gloo" in first
    assert f"ended with exit code -{signal.SIGKILL}" in second and "about to be killed" in second
    assert time.monotonic() - start < 60, "the timeout of the group"
