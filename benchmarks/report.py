"""What all benchmarks' reports share: the choice of what is measured, how a report begins, and its two files."""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
from collections.abc import Collection, Sequence
from typing import Any

import environment

__all__ = ["RESULTS", "heading", "split_choices", "write"]

RESULTS = pathlib.Path(__file__).parent / "results"


def split_choices(parser: argparse.ArgumentParser, args: argparse.Namespace, **known: Collection[str]) -> None:
    """Replaces each named field, words with commas between, by the list of its words; exits where one is not known."""
    for field, words in known.items():
        chosen = getattr(args, field).split(",")
        if unknown := set(chosen) - set(words):
            parser.error(f"unknown {field}: {', '.join(sorted(unknown))}; known: {', '.join(words)}")
        setattr(args, field, chosen)


def heading(title: str, facts: dict[str, str]) -> list[str]:
    """A report's first lines: the title with the device's name, and on what else it was made."""
    return [f"# {title}, {facts['device']}", "", ", ".join(f"{k} {v}" for k, v in facts.items() if k != "device"), ""]


def write(
    folder: pathlib.Path, name: str, facts: dict[str, str], markdown: str, rows: Sequence[Any] = (), **settings: Any
) -> None:
    """Writes <name>-<device>.md and, of rows that are dataclasses, .json with the settings that they were measured with."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{environment.device_slug(facts)}"
    path.with_suffix(".md").write_text(markdown)
    if rows:
        whole = {"environment": facts, **settings, "rows": [dataclasses.asdict(row) for row in rows]}
        path.with_suffix(".json").write_text(json.dumps(whole, indent=1) + "\n")
    print(f"Wrote {path}.md{' and .json' if rows else ''}")
