"""benchmarks/few_rows.py and fit_cost.py: the fit finds the times that a run was made from."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest


@pytest.fixture
def few_rows(import_benchmark: Callable[[str], ModuleType]) -> ModuleType:
    return import_benchmark("few_rows")


def test_the_fit_finds_the_times_of_a_run(few_rows: ModuleType) -> None:
    fit_cost = pytest.importorskip("fit_cost")
    square, linears, narrow, _, gelu = (title for title, *_ in few_rows.CASES.values())
    assert fit_cost.linears_of(gelu) is None and len(fit_cost.linears_of(narrow)) == 4
    run = [
        {"case": case, "mode": few_rows.MODES[1], "rows": m} for case in (square, linears, narrow) for m in (512, 2048)
    ]
    table = [fit_cost.features(row) for row in run]
    # Four linears of [4096, 4096] and 512 rows of x and dy, three GEMMs each.
    assert table[0] == pytest.approx([4, 4 * 4096**2 / 1e6, 4 * 512 * 8192 / 1e6, 4 * 6 * 512 * 4096**2 / 1e6])
    times = [29.0, 2.3, 1.6, 1 / 1400]
    us = [sum(a * b for a, b in zip(times, sums, strict=True)) for sums in table]
    assert fit_cost.fit(table, us, [1.0] * len(us)) == pytest.approx(times)
    wrong = [*us[:-1], us[-1] * 2]
    assert fit_cost.fit(table, wrong, [1.0] * (len(us) - 1) + [1e-9]) == pytest.approx(times), (
        "what is far away counts nothing"
    )


def test_forward_alone_quantizes_no_dy(few_rows: ModuleType) -> None:
    fit_cost = pytest.importorskip("fit_cost")
    forward, both = (
        fit_cost.features({"case": "4 linears 4096", "mode": mode, "rows": 256}) for mode in few_rows.MODES
    )
    assert [b / f for f, b in zip(forward, both, strict=True)] == [1, 1, 2, 3]
