"""Programs drawn at random that write in place (write_programs.py): through the backend they compute what they do in eager.

`make fuzz N=2000` runs any number of them, others each time. What fails is shrunk and printed as a program.
"""

from __future__ import annotations

import collections
import os
import re
from typing import Any

import pytest
from helpers.fuzz.write_oracle import NotComparable, Wrong, check, shrunk
from helpers.fuzz.write_programs import Program, drawn

PROGRAMS = int(os.environ.get("FUZZ_MODELS", 60))
SEED = int(os.environ.get("FUZZ_SEED", 0))
PARTS = 3

_MATCH = "te_dynamo.passes.torch_ir.match"
PLANTED: dict[str, dict[str, Any]] = {
    "a replacement lies where the replaced does": {f"{_MATCH}.values.take_over": lambda node, new: None},
    "what is unknown writes everything": {f"{_MATCH}.writes.is_known": lambda node: True},
    "a schema says what is written": {f"{_MATCH}.writes._overloads": lambda node: []},
    "some writes have no name": {f"{_MATCH}.writes._HIDDEN": {}},
    "what is inside counts": {
        f"{_MATCH}.mutation._values_at": lambda place, nodes, own: {
            value for reader in nodes if reader < place for value in reader.all_input_nodes if value not in own
        }
    },
    "a kept weight is not written": {"te_dynamo.passes.torch_ir.workspaces.written_inputs": lambda graph: set()},
    "nor what is derived from it": {
        "te_dynamo.passes.torch_ir.workspaces.reads_through": lambda reader, *between: True
    },
    "some writes change a form": {f"{_MATCH}.mutation.changes_form": lambda node: False},
    "an underscore writes": {f"{_MATCH}.writes._writes_first_argument": lambda node: False},
}
"""A rule of the implementation -> what takes the place of what in it. The programs find each one's loss."""

FOUND_WITHIN = 2000
WRITES_UNKNOWN = re.compile(r"allowed\(|nonstrict\(|\.numpy\(\)")
"""Few programs write by a function that nobody knows."""


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
            raise AssertionError(
                f"{wrong}\n\nof program {seed}, smaller here ({small.settings()}):\n\n{small.source()}"
            ) from None
    print(outcomes)
    assert outcomes["right"] >= outcomes.total() / 2, f"too few programs say something: {outcomes}"


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("rule", PLANTED)
def test_a_lost_rule_is_found(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a program that is right with the rule."""

    def is_wrong_without(program: Program) -> bool:
        with monkeypatch.context() as patched:
            for where, instead in PLANTED[rule].items():
                patched.setattr(where, instead)
            return _is_wrong(program)

    programs = map(drawn, range(FOUND_WITHIN))
    if "unknown" in rule:
        programs = (program for program in programs if WRITES_UNKNOWN.search(program.source()))
    assert any(is_wrong_without(p) and not _is_wrong(p) for p in programs), f"{FOUND_WITHIN} programs do without"
