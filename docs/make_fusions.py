"""Writes docs/fusions.md from the docstrings of the fusion files: `python docs/make_fusions.py`."""

from __future__ import annotations

import importlib
import inspect
import pathlib
import re
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

PAGE = pathlib.Path(__file__).parent / "fusions.md"

PACKAGES = ("te_dynamo.passes.dialect.fusions", "te_dynamo.operations.fused")
"""Where fusions are shipped: packages with a SHIPPED, the fusions by their kind."""

Fusion = Callable[..., Any]

KINDS = {
    "joint": "sees forward and backward together; only the pair of halves must be right",
    "forward": "sees forward alone, also what backward recomputes; what it saves suits the unfused backward",
    "backward": "sees backward alone; takes what the unfused forward saved",
}

INTRO = """\
# Fusions

These are the fusions that te_dynamo ships. Those of `passes/dialect` rewrite the compiler's graphs. Those of
`te_dynamo/operations/fused` rewrite the list of operations of a `te_dynamo.Sequential`. `options={"fusions": False}` turns all of them off.
`options={"fusions": ["-fuse_gemm_bias"]}` turns one of the graph's off. [Writing a fusion](writing-a-fusion.md) says how to add one.

`python docs/make_fusions.py` writes this page from the docstrings of the fusion files: edit those.
"""

INDUCTORS = """\
## What Inductor fuses by itself

- A norm's gradient and the residual gradient that it is added to: the norms' backward is written in aten operations, which
  Inductor puts into one kernel with the addition.
- The amax of a gradient that Inductor's own kernel writes: `lowering/trace.py` leaves it to that kernel.
- What stands between two operations of ours and is elementwise: dropout, rotary embeddings, casts.
"""


def page() -> str:
    """The page's text."""
    modules = [module for package in PACKAGES for module in _modules(package)]
    lines = [INTRO, "| kind | what it may assume |", "| --- | --- |"]
    lines += [f"| {kind} | {text} |" for kind, text in KINDS.items()]
    lines += ["", "| fusion | kind | pattern |", "| --- | --- | --- |"]
    for module, fusions in modules:
        for fusion, kinds in fusions.items():
            lines.append(f"| [`{name(fusion)}`](#{_anchor(module)}) | {', '.join(kinds)} | {_first_line(fusion)} |")
    sections = [_section(module, fusions) for module, fusions in modules]
    return "\n".join(lines) + "\n\n" + "\n".join([*sections, INDUCTORS])


def name(fusion: Fusion) -> str:
    """What a reader calls it; of one that a function makes, the function."""
    return re.split(r"[.(]", fusion.__qualname__)[0]


def _modules(package: str) -> list[tuple[ModuleType, dict[Fusion, list[str]]]]:
    """The modules of the fusions that the package ships, by name, each with {fusion: its kinds}."""
    found: dict[str, dict[Fusion, list[str]]] = {}
    for kind, shipped in importlib.import_module(package).SHIPPED.items():
        for fusion in shipped:
            found.setdefault(fusion.__module__, {}).setdefault(fusion, []).append(kind)
    return [(sys.modules[of], found[of]) for of in sorted(found, key=lambda of: of.rpartition(".")[2])]


def _section(module: ModuleType, fusions: dict[Fusion, list[str]]) -> str:
    """Heading, kinds, and the docstring: its first sentence, the graphs before and after (indented, so code), the rest."""
    names = ", ".join(f"`{name(fusion)}` ({', '.join(kinds)})" for fusion, kinds in fusions.items())
    source = pathlib.Path(module.__file__ or "").resolve().relative_to(PAGE.parents[1].resolve())
    return f"## {_title(module)}\n\n{names} in `{source}`\n\n{inspect.cleandoc(module.__doc__ or '')}\n"


def _title(module: ModuleType) -> str:
    return module.__name__.rpartition(".")[2].replace("_", " ").capitalize()


def _anchor(module: ModuleType) -> str:
    return _title(module).lower().replace(" ", "-")


def _first_line(fusion: object) -> str:
    return (inspect.getdoc(fusion) or "").partition("\n")[0]


if __name__ == "__main__":
    PAGE.write_text(page())
