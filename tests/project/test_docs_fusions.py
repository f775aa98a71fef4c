"""docs/fusions.md is what the fusion files say."""

from __future__ import annotations

import importlib.util
import inspect
import pathlib
import re
import sys
from types import ModuleType

import pytest

from te_dynamo.fusion_registry import Fusion
from te_dynamo.operations import fused
from te_dynamo.passes.dialect import fusions

DOCS = pathlib.Path(__file__).parents[2] / "docs"
SHIPPED = [(kind, f) for home in (fusions, fused) for kind, shipped in home.SHIPPED.items() for f in shipped]


@pytest.fixture(scope="module")
def make_fusions() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_fusions", DOCS / "make_fusions.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_up_to_date(make_fusions: ModuleType) -> None:
    assert make_fusions.PAGE.read_text() == make_fusions.page(), "run `python docs/make_fusions.py`"


@pytest.mark.parametrize(("kind", "fusion"), SHIPPED, ids=lambda value: getattr(value, "__qualname__", value))
def test_every_shipped_fusion_is_on_the_page_with_its_kind(make_fusions: ModuleType, kind: str, fusion: Fusion) -> None:
    row = next(
        line for line in make_fusions.page().splitlines() if line.startswith(f"| [`{make_fusions.name(fusion)}`]")
    )
    assert kind in row.split("|")[2]


@pytest.mark.parametrize("fusion", [f for _, f in SHIPPED], ids=lambda f: f.__qualname__)
def test_every_fusion_shows_its_graph_before_and_after(fusion: Fusion) -> None:
    """Indented in the module's docstring, so that the page has them as code."""
    text = inspect.getdoc(sys.modules[fusion.__module__]) or ""
    assert re.search(r"^    before +\S", text, re.MULTILINE) and re.search(r"^    after +\S", text, re.MULTILINE)
    assert inspect.getdoc(fusion)


def test_links_lead_to_headings(make_fusions: ModuleType) -> None:
    page = make_fusions.page()
    headings = {line[3:].lower().replace(" ", "-") for line in page.splitlines() if line.startswith("## ")}
    links = re.findall(r"\(#([\w-]+)\)", page)
    assert links and set(links) <= headings
