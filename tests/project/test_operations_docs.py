"""docs/operations.md: its table lists every basic operation. Its code runs in test_docs.py."""

from __future__ import annotations

import pathlib
import re

from te_dynamo.operations import basic

PAGE = (pathlib.Path(__file__).parents[2] / "docs" / "operations.md").read_text()


def test_the_page_lists_every_basic_operation() -> None:
    table = PAGE.partition("## The basic operations")[2].partition("## ")[0]
    assert set(re.findall(r"`(\w+)\(", table)) == set(basic.__all__)
