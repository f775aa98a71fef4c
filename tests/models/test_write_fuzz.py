"""Programs drawn at random that write in place (write_programs.py): through the backend they compute what they do in eager.

`make fuzz N=2000` runs any number of them, others each time. What fails is shrunk and printed as a program.
"""

from __future__ import annotations

import collections
import os
from collections.abc import Callable
from typing import Any

import pytest
from helpers.fuzz.write_oracle import NotComparable, Wrong, check, shrunk
from helpers.fuzz.write_programs import Program, drawn

PROGRAMS = int(os.environ.get("FUZZ_MODELS", 60))
SEED = int(os.environ.get("FUZZ_SEED", 0))
PARTS = 3

PLANTED: list[tuple[str, str, Callable[..., Any]]] = []
"""What a rule of the implementation is, where it lies, and what takes its place: each is found."""


def _is_wrong(program: Program) -> bool:
    try:
        check(program)
    except Wrong:
        return True
    except NotComparable:
        pass
    return False


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_drawn_programs(part: int) -> None:
    outcomes: collections.Counter[str] = collections.Counter()
    for seed in range(SEED + part, SEED + PROGRAMS, PARTS):
        try:
            check(program := drawn(seed))
            outcomes["right"] += 1
        except NotComparable as reason:
            outcomes[str(reason)] += 1
        except Wrong as wrong:
            small = shrunk(program, _is_wrong)
            raise AssertionError(f"{wrong}\n\nof program {seed}, smaller here ({small.settings()}):\n\n{small.source()}") from None
    print(outcomes)
    assert outcomes["right"] >= outcomes.total() / 2, f"too few programs say something: {outcomes}"


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize(("where", "instead"), [p[1:] for p in PLANTED], ids=[p[0] for p in PLANTED])
def test_a_rule_that_is_lost_is_found(where: str, instead: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(where, instead)
    assert any(_is_wrong(drawn(seed)) for seed in range(600))
