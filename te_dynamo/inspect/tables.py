"""Text in a terminal's width: tables that fit it, and paragraphs."""

from __future__ import annotations

import dataclasses
import io
import re
import shutil
from collections.abc import Iterable, Sequence
from typing import Any

from rich.box import MARKDOWN
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.containers import Lines
from rich.table import Table
from rich.text import Text

_WIDTH = 160
"""Where there is no terminal: of a file, a notebook, a test."""


@dataclasses.dataclass
class FittedTable:
    """A table without its empty columns.

    optional: columns that go where the table would be wider than the terminal, the first at first. A line below names them. What is wider
        even so is folded.
    """

    title: str
    columns: Sequence[str]
    rows: Iterable[Sequence[Any]]
    optional: Sequence[str] = ()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        columns, rows = self.filled()
        gone: list[str] = []
        for name in (*self.optional, None):
            table = self._table(columns, rows)
            if (
                name is None
                or console.measure(table, options=options.update(max_width=10_000)).maximum <= options.max_width
            ):
                break
            if name in columns:
                place = columns.index(name)
                columns, rows = _without(columns, place), [_without(row, place) for row in rows]
                gone.append(name)
        yield table
        if gone:
            yield paragraph(f"A wider terminal also shows: {', '.join(gone)}.")

    def filled(self) -> tuple[list[str], list[list[str]]]:
        """(columns, rows) as text, without the empty columns."""
        rows = [[str(cell) for cell in row] for row in self.rows]
        shown = [index for index in range(len(self.columns)) if any(row[index] for row in rows)]
        return [self.columns[index] for index in shown], [[row[index] for index in shown] for row in rows]

    def _table(self, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
        table = Table(title=self.title or None, title_justify="left", box=MARKDOWN)
        for name in columns:
            table.add_column(Text(name), overflow="fold")
        for row in rows:
            table.add_row(*map(_Cell, row))
        return table


class _Cell(Text):
    """Text whose too long words break behind a dot or an underscore, where there is one."""

    def wrap(self, console: Console, width: int, **given: Any) -> Lines:  # type: ignore[override]
        pieces = re.compile(rf".{{1,{width}}}$|.{{0,{width - 1}}}[._]|.{{{width}}}")
        broken = re.sub(r"^\s*\S+|\S+", lambda word: "\n".join(pieces.findall(word[0])), self.plain)
        return Text(broken).wrap(console, width, **given)


def _without(cells: list[str], place: int) -> list[str]:
    return cells[:place] + cells[place + 1 :]


def paragraph(text: str, indent: int = 0) -> RenderableType:
    """`text` in the terminal's width, its lines after the first `indent` columns to the right."""
    if not indent:
        return Text(text)
    head, _, rest = text.partition(" ")
    grid = Table.grid()
    grid.add_column(width=indent)
    grid.add_row(Text(head), Text(rest))
    return grid


def text_of(parts: Iterable[RenderableType]) -> str:
    """The parts below each other, for `print`: as wide as the terminal that stdout is."""
    text = io.StringIO()
    width, height = shutil.get_terminal_size((_WIDTH, 24))
    # Without a height rich takes 80 columns where TERM=dumb.
    console = Console(file=text, width=width, height=height, color_system=None)
    for part in parts:
        console.print(part)
    lines = "\n".join(line.rstrip() for line in text.getvalue().strip().splitlines())
    return re.sub(r"\n{3,}", "\n\n", lines)  # the box of a table has an empty line above and below
