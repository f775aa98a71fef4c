"""What quantizes its own result by blocks or rows, compiled for each kind of GPU by benchmarks/targets.py: no register is spilled."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import ModuleType

import pytest
from helpers.slow import EXHAUSTIVE

CASES = {
    "fast": r"^gated silu in (1x128|MXFP8 32|rows), rows and columns$",
    "rows and columns": r" in (1x128|128x128|MXFP8 32|MXFP8 128|rows), rows and columns",
    "rows": r" in (1x128|128x128|MXFP8 32|MXFP8 128|rows), rows(,|$)",
}
MARKS = {"rows and columns": pytest.mark.slow, "rows": EXHAUSTIVE}


def test_no_recorded_kernel_spills(import_benchmark: Callable[[str], ModuleType]) -> None:
    """Of all targets; `make machine-code` says whether the record is today's code."""
    record = import_benchmark("targets").recorded_in()
    rows = [row for row in record.rows if any(re.search(cases, row["case"]) for cases in CASES.values())]
    assert len({row["target"] for row in rows}) == 6
    assert [row for row in rows if row["error"] or row["spills"] or row["shared_kib"] > row["most_kib"]] == []


@pytest.mark.parametrize(
    "name",
    ["h200", *(pytest.param(other, marks=EXHAUSTIVE) for other in ("l40s", "b200", "rtx5090"))],
)
@pytest.mark.parametrize("cases", [pytest.param(name, marks=MARKS.get(name, ())) for name in CASES])
def test_no_register_is_spilled(name: str, cases: str, import_benchmark: Callable[[str], ModuleType]) -> None:
    rows = import_benchmark("targets").compiled(name, CASES[cases])
    assert rows
    for row in rows:
        assert not row.error and row.spills == 0 and row.shared_kib <= row.most_kib, row
