"""README.md and docs/: every Python block runs as it is printed, and the words keep the house's rules."""

from __future__ import annotations

import pathlib
import re
import sys
import types

import pytest

import te_dynamo
from te_dynamo import fusion_registry

pytest.importorskip("sybil")  # a GPU machine without a network may lack it

from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser

ROOT = pathlib.Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

SLOW = {
    "README",
    "distributed",
    "frameworks",
    "inspect",
    "left-alone",
    "quickstart",
    "recipes",
    "serve",
    "training",
    "weights",
}
"""Pages that compile with Inductor: its C++ takes some seconds a model."""

ELSEWHERE = {"writing-a-fusion"}
"""This page is examples/custom_fusion.py, which test_writing_a_fusion.py runs: an operation is defined once a process."""

NEEDS = {"frameworks": ("accelerate", "lightning", "peft", "transformers")}


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=page.stem, marks=[pytest.mark.slow] if page.stem in SLOW else [])
        for page in PAGES
        if page.stem not in ELSEWHERE
    ],
)
def test_the_code_runs(page: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One module a page, its blocks in their order, in an empty folder."""
    for package in NEEDS.get(page.stem, ()):
        pytest.importorskip(package)
    document = Sybil([PythonCodeBlockParser()]).parse(page)
    module = types.ModuleType(f"page_{page.stem.replace('-', '_')}")
    monkeypatch.setitem(sys.modules, module.__name__, module)  # where dataclasses look names up
    monkeypatch.chdir(tmp_path)
    document.namespace = module.__dict__
    before = _registered()
    try:
        for example in document:
            example.evaluate()
    finally:
        for fusion in _registered() - before:
            te_dynamo.unregister_fusion(fusion)


def _registered() -> set[fusion_registry.Fusion]:
    return {
        f for of in ("graph", "ops") for phase in fusion_registry.PHASES for f in fusion_registry.registered(of, phase)
    }


def test_every_block_of_python_is_found() -> None:
    """Sybil passes over a fence that it does not know."""
    for page in PAGES:
        text = page.read_text()
        found = len(list(Sybil([PythonCodeBlockParser()]).parse(page)))
        assert found == len(re.findall(r"^ *```python", text, re.MULTILINE)), page.name
        assert not re.search(r"^ *```(py|pycon|python3?[^\n]+)$", text, re.MULTILINE), page.name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_no_commit_and_no_date(page: pathlib.Path) -> None:
    """They belong to benchmarks/results/ and CHANGELOG.md."""
    text = re.sub(r"<!--.*?-->", "", page.read_text(), flags=re.DOTALL)
    hashes = [w for w in re.findall(r"\b[0-9a-f]{7,40}\b", text) if re.search(r"\d", w) and re.search(r"[a-f]", w)]
    assert not hashes
    assert not re.findall(r"\b20\d\d-\d\d-\d\d\b", text)


HISTORY = r"\b(no longer|used to be|previously|formerly|in earlier (runs|versions|commits)|at an earlier commit|until commit|before this commit)\b"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_present_alone(page: pathlib.Path) -> None:
    """What an earlier version did is git's to tell."""
    assert not re.findall(HISTORY, page.read_text(), re.IGNORECASE)


def test_lengths() -> None:
    assert len((ROOT / "README.md").read_text().split()) <= 700
    assert len((ROOT / "docs" / "architecture.md").read_text().split()) <= 2000


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_tables_fit_720_pixels(page: pathlib.Path) -> None:
    """As the site draws them: a column is as wide as its longest word, and 100 pixels at least. Code may break anywhere."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for found in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        rows = [re.split(r"(?<!\\)\|", line.strip()[1:-1]) for line in found.splitlines() if line.strip("|-: ")]
        words = [[re.split(r"[\s/-]", re.sub(r"`[^`]*`|\]\([^)]*\)", " ", cell)) for cell in row] for row in rows]
        width = sum(
            max(100, *(32 + 7 * len(word) for cell in column for word in cell)) for column in zip(*words, strict=True)
        )
        assert width <= 720, found.splitlines()[0]


def test_links_of_the_readme_lead_to_files() -> None:
    """Those of docs/ are checked by `make docs`."""
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"):
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
