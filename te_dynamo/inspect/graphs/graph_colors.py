"""The text of a graph in a terminal's colours: te operations stand out, types and inputs step back."""

from __future__ import annotations

import io

from rich.console import Console
from rich.text import Text

from te_dynamo.inspect.graphs.dtype_names import DTYPE_NAMES

_STYLES = (
    (rf"\b(?:{'|'.join(DTYPE_NAMES.values())})\b(?:\[[^\]]*\])?", "cyan"),
    (r"\bte\.\w+", "bold green"),
    (r"\btriton\.\w+", "bold magenta"),
    (r"\b(?:aten|torch|F|prims)\.\w+", "blue"),
    (r"(?m)= input$", "dim"),
    (r"(?m)^ *return\b", "bold"),
)
"""Regular expression -> rich's style."""


def colored(text: str) -> str:
    """`text`, of graph_text, with the escape codes of a terminal."""
    styled = Text(text)
    for pattern, style in _STYLES:
        styled.highlight_regex(pattern, style)
    shown = io.StringIO()
    Console(file=shown, force_terminal=True, color_system="standard", no_color=False).print(
        styled, soft_wrap=True, end=""
    )
    return shown.getvalue()


def terminal_shows_colors() -> bool:
    """Whether stdout is a terminal with colours, and NO_COLOR is not set."""
    console = Console()
    return console.color_system is not None and not console.no_color
