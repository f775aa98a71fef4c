"""Parameters of which a few run in `make test` and the others with the slow tests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

EXHAUSTIVE = (pytest.mark.slow, pytest.mark.exhaustive)
"""Of a case of what another test says already. CI, which has an hour and a half, does not run it; `make test-all` does."""


def slow_but(fast: int, cases: Iterable[Any]) -> list[Any]:
    """The cases as pytest's parameters, all marked slow but `fast` of them, evenly spread. A tuple is several arguments."""
    cases = list(cases)
    now = {index * len(cases) // fast for index in range(fast)}
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=() if index in now else pytest.mark.slow)
        for index, case in enumerate(cases)
    ]
