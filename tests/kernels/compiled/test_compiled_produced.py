"""What quantizes its own result by blocks, compiled for each kind of GPU by benchmarks/targets.py: no register is spilled."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
from helpers.slow import slow_but

CASES = {
    "fast": r"^gated silu in (1x128|MXFP8 32), rows and columns$",
    "rows and columns": r" in (1x128|128x128|MXFP8 32|MXFP8 128), rows and columns",
    "rows": r" in (1x128|128x128|MXFP8 32|MXFP8 128), rows(,|$)",
}


@pytest.mark.one_fast_case
@pytest.mark.parametrize("name", ["h200", "l40s", "b200", "rtx5090"])
@pytest.mark.parametrize("cases", slow_but(1, CASES))
def test_no_register_is_spilled(name: str, cases: str, import_benchmark: Callable[[str], ModuleType]) -> None:
    rows = import_benchmark("targets").compiled(name, CASES[cases])
    assert rows
    for row in rows:
        assert not row.error and row.spills == 0 and row.shared_kib <= row.most_kib, row
