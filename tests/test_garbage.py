"""te_dynamo/garbage.py: no full collection while something is compiled, and the user's thresholds afterwards."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from te_dynamo.garbage import without_full_collections


@pytest.fixture(autouse=True)
def thresholds() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(200, 2, 2)
    yield
    gc.set_threshold(*before)


def full_collections(compute: Any) -> int:
    """How many there are meanwhile."""
    seen = []

    def note(phase: str, information: dict[str, int]) -> None:
        seen.extend([information["generation"]] if phase == "start" else [])

    gc.callbacks.append(note)
    try:
        kept = compute()
    finally:
        gc.callbacks.remove(note)
    assert kept and seen, "young objects are collected in any case"
    return seen.count(2)


def many_objects() -> list[list[int]]:
    return [
        [index] for index in range(2_000_000)
    ]  # as many as a process with torch has, so that a full collection is due


def test_old_objects_are_left_alone_inside() -> None:
    assert full_collections(many_objects) > 0

    def inside() -> list[list[int]]:
        with without_full_collections():
            return many_objects()

    assert full_collections(inside) == 0
    assert gc.get_threshold() == (200, 2, 2)


def many_and_then(few: int) -> list[list[int]]:
    with without_full_collections():
        kept = many_objects()
    return kept + [[index] for index in range(few)]


def test_none_comes_at_once_afterwards() -> None:
    """What Dynamo does after its backend is compilation too."""
    assert full_collections(lambda: many_and_then(600)) == 0
    assert full_collections(lambda: many_and_then(2_000_000)) > 0


def test_what_the_user_froze_stays_frozen() -> None:
    """Some of them die meanwhile, so one is asked beside their number."""
    theirs: list[object] = []
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        with without_full_collections():
            pass
        assert 0 < gc.get_freeze_count() <= frozen and all(thawed is not theirs for thawed in gc.get_objects())
    finally:
        gc.unfreeze()


def test_the_last_one_out_restores() -> None:
    first, second = without_full_collections(), without_full_collections()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert gc.get_threshold()[2] > 10**6, "another thread still compiles"
    with pytest.raises(KeyError), without_full_collections():
        raise KeyError
    second.__exit__(None, None, None)
    assert gc.get_threshold() == (200, 2, 2)


def test_thresholds_set_meanwhile_stay() -> None:
    with without_full_collections():
        gc.set_threshold(300, 3, 3)
    assert gc.get_threshold() == (300, 3, 3)


def test_a_compilation_is_inside() -> None:
    seen = []

    def watching(graph: torch.fx.Graph) -> None:
        seen.append(gc.get_threshold()[2])

    model = torch.nn.Linear(32, 32)
    compiled = torch.compile(model, backend="te", options={"post_grad_custom_post_pass": watching})
    compiled(torch.randn(4, 32)).sum().backward()
    assert len(seen) == 2 and min(seen) > 10**6, "forward and backward"
    assert gc.get_threshold() == (200, 2, 2)
