"""What a rewrite changed of a graph, for tests that assert that alone."""

from __future__ import annotations

from te_dynamo.testing import graph_diff


def changes(before: str, after: str, gone: bool = True) -> str:
    """The lines that differ, below the numbers of the lines in both texts; "" where none does. All others are as they were.

    gone: with the lines of `before` that went; a test that asserts `before` too knows them by their numbers.
    """
    lines = graph_diff(before, after, context=0).splitlines()[2:]
    return "\n".join(line for line in lines if gone or not line.startswith("-"))
