"""Writes docs/fusions.md from the docstrings of the fusion files: `python docs/make_fusions.py`."""

from __future__ import annotations

import importlib
import inspect
import pathlib
import pkgutil
from types import ModuleType

PAGE = pathlib.Path(__file__).parent / "fusions.md"

PACKAGES = ("te_dynamo.passes.fusions",)
"""Where fusions are shipped: packages with a SHIPPED, the fusions by their kind."""

KINDS = {
    "joint": "sees forward and backward in one graph; only the pair of halves must be right",
    "forward": "sees a forward or inference graph (and what backward recomputes); what it saves suits the unfused backward",
    "backward": "sees a backward graph; takes what the unfused forward saved",
}

INTRO = """\
# Fusions

Written by `python docs/make_fusions.py` from the fusion files' docstrings; do not edit. What a fusion is and how to add
one: `docs/architecture.md`. `options={"fusions": False}` turns all of them off, `{"fusions": ["-fuse_gemm_bias"]}` one.
"""

INDUCTORS = """\
## What Inductor fuses by itself

- A norm's gradient and the residual gradient that it is added to: the norms' backward is written in aten operations, which
  Inductor puts into one kernel with the addition.
- The amax of a gradient that Inductor's own kernel writes: `lowering/amax.py` leaves it to that kernel.
- What stands between two operations of ours and is elementwise: dropout, rotary embeddings, casts.
"""


def page() -> str:
    """The page's text."""
    modules = [module for package in PACKAGES for module in _modules(package)]
    lines = [INTRO, "| kind | what it may assume |", "| --- | --- |"]
    lines += [f"| {kind} | {text} |" for kind, text in KINDS.items()]
    lines += ["", "| fusion | kind | pattern |", "| --- | --- | --- |"]
    for module, kinds in modules:
        for name, kind in kinds.items():
            lines.append(f"| [`{name}`](#{_anchor(module)}) | {kind} | {_first_line(getattr(module, name))} |")
    sections = [_section(module, kinds) for module, kinds in modules]
    return "\n".join(lines) + "\n\n" + "\n".join([*sections, INDUCTORS])


def _modules(package: str) -> list[tuple[ModuleType, dict[str, str]]]:
    """The package's modules that hold a shipped fusion, by name, each with {fusion: kind}."""
    home = importlib.import_module(package)
    found = []
    for info in sorted(pkgutil.iter_modules(home.__path__), key=lambda info: info.name):
        module = importlib.import_module(f"{package}.{info.name}")
        kinds = {f.__name__: kind for kind, fusions in home.SHIPPED.items() for f in fusions if _is_from(f, module)}
        if kinds:
            found.append((module, kinds))
    return found


def _is_from(fusion: object, module: ModuleType) -> bool:
    return getattr(fusion, "__module__", None) == module.__name__


def _section(module: ModuleType, kinds: dict[str, str]) -> str:
    """Heading, kinds, and the docstring: its first sentence, the graphs before and after (indented, so code), the rest."""
    names = ", ".join(f"`{name}` ({kind})" for name, kind in kinds.items())
    source = module.__name__.removeprefix("te_dynamo.").replace(".", "/") + ".py"
    return f"## {_title(module)}\n\n{names} in `{source}`\n\n{inspect.cleandoc(module.__doc__ or '')}\n"


def _title(module: ModuleType) -> str:
    return module.__name__.rpartition(".")[2].replace("_", " ").capitalize()


def _anchor(module: ModuleType) -> str:
    return _title(module).lower().replace(" ", "-")


def _first_line(fusion: object) -> str:
    return (inspect.getdoc(fusion) or "").partition("\n")[0]


if __name__ == "__main__":
    PAGE.write_text(page())
