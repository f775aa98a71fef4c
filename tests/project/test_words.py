"""README.md and docs/ use the field's words: phrases that are out, each with the words to use instead."""

from __future__ import annotations

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

OUT = {
    r"add(s|ed)? up": "accumulates",
    r"sums in fp32": "accumulation in fp32",
    r"kept weights?|weights that are kept": "cached weights",
    r"the (GPU|machine) at hand": "this GPU, this machine",
    r"scales? a tensor": "a per-tensor scale",
    r"scales? an expert|bytes? a value|bytes? a parameter": "per expert, per value, per parameter",
    r"linears": "linear layers",
    r"waits for the CPU": "is CPU-bound",
    r"what pays": "the cost model, which layers gain",
    r"no speed": "much slower than bf16",
    r"is made of a model": "which layers run in FP8",
    r"a product of (ours|a weight)": "one of our GEMMs",
    r"(is|are) left alone|(is|are) left (at|in) \d": "stays in bf16",
}


def prose(page: str) -> str:
    """A page without code, comments, link targets and generated tables, its lines joined."""
    page = re.sub(r"<!-- table:.*?<!-- end -->|<!--.*?-->|^```.*?^```$", "", page, flags=re.DOTALL | re.MULTILINE)
    page = re.sub(r"^    .*$|`[^`\n]*`|\]\([^)]*\)", "", page, flags=re.MULTILINE)
    return " ".join(page.split())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_words(page: pathlib.Path) -> None:
    text = prose(page.read_text())
    found = {m[0]: better for words, better in OUT.items() for m in re.finditer(rf"\b({words})\b", text, re.IGNORECASE)}
    assert not found, f"{page.name} says: " + ", ".join(f"{was!r} (better: {better})" for was, better in found.items())
