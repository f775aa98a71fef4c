"""docs/operations.md: its code runs, and its table lists every basic operation."""

from __future__ import annotations

import pathlib
import re
import sys
import types

import pytest

from te_dynamo.operations import basic

PAGE = (pathlib.Path(__file__).parents[2] / "docs" / "operations.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize("index", range(len(BLOCKS)))
def test_the_pages_code_runs(index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType(f"operations_page_{index}")
    monkeypatch.setitem(sys.modules, module.__name__, module)  # where dataclasses look names up
    exec(compile(BLOCKS[index], f"docs/operations.md, block {index}", "exec"), module.__dict__)


def test_the_page_lists_every_basic_operation() -> None:
    table = PAGE.partition("## The basic operations")[2].partition("## ")[0]
    assert set(re.findall(r"`(\w+)\(", table)) == set(basic.__all__)
