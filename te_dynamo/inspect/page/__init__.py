"""The page of `Explanation.to_html`: one file with all it needs, which loads nothing.

data.py      Explanation -> plain data: cards, reasons, tables
head.py      what was explained, where, when, by which versions
modules.py   rows of linears, norms and activations -> the tree of modules, equal layers one row
graphs.py    the captured graphs -> nodes and arrows to draw, equal layers once
numerics.py  Comparison -> cards, dots and columns
parts.html.j2                              the tabs Overview and Numerics, which a notebook shows too
template.html.j2, style.css                the page around them
notebook.html.j2                           a notebook's output around them: no script runs there
tree.js, graphs.js, tables.js, page.js     what moves: the tabs Modules, Graphs, Details and Numerics; all tabs
vendor/      Tabulator, Cytoscape.js and its dagre layout, as published; `make vendor` renews them
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup

from te_dynamo.inspect.page.data import page_data

if TYPE_CHECKING:
    from te_dynamo.inspect.explain import Explanation
    from te_dynamo.inspect.tables import FittedTable

__all__ = ["in_notebook", "render"]

_FOLDER = Path(__file__).parent
_SCRIPTS = (
    "vendor/tabulator.min.js",
    "vendor/cytoscape.min.js",
    "vendor/cytoscape-dagre.min.js",
    "tree.js",
    "graphs.js",
    "tables.js",
    "page.js",
)
_STYLES = ("vendor/tabulator.min.css", "style.css")


def render(explanation: Explanation, comparison: Any = None) -> str:
    """The page's HTML.

    comparison: None, or what te_dynamo.compare found.
    """
    return _template("template.html.j2").render(
        data=page_data(explanation, comparison),
        scripts=[_asset(name) for name in _SCRIPTS],
        styles=[_asset(name) for name in _STYLES],
    )


def in_notebook(
    overview: dict[str, Any] | None = None,
    numerics: dict[str, Any] | None = None,
    title: str = "",
    table: FittedTable | None = None,
    notes: Sequence[str] = (),
) -> str:
    """HTML for `_repr_html_`: those of the page's parts that are given, then a table with its title, then notes."""
    columns, rows = table.filled() if table else ([], [])
    return _template("notebook.html.j2").render(
        overview=overview, numerics=numerics, title=title, columns=columns, rows=rows, notes=notes
    )


def _template(name: str) -> Template:
    environment = Environment(
        loader=FileSystemLoader(_FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(name)


def _asset(name: str) -> Markup:
    """A file of ours, unescaped."""
    return Markup((_FOLDER / name).read_text(encoding="utf-8"))
