"""What a notebook shows of an explanation and of comparisons: parts of the page and tables, as HTML in which nothing has to run."""

import html
import re

import pytest
import torch
from helpers.comparisons import comparison
from torch import nn

import te_dynamo
from te_dynamo.accuracy.comparison import RecipesCompared
from te_dynamo.inspect.page import render

LAYERS = [f"layers.{i}.<fc>" for i in range(3)]


@pytest.fixture(scope="module")
def explained():
    return te_dynamo.explain(nn.Sequential(nn.Linear(32, 32)), torch.ones(32, 32), rules=[("<0|0", None)])


def words(text):
    """What is read: without tags and styles."""
    text = re.sub(r"<style>.*?</style>", "", text, flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", text)).split())


def cells(text):
    return [
        [html.unescape(cell) for cell in re.findall(r"<t[hd]>(.*?)</t[hd]>", row)] for row in text.split("<tr>")[1:]
    ]


def test_an_explanation_shows_the_overview_of_its_page(explained):
    page = render(explained)
    overview = words(page[page.index('<section id="overview">') : page.index('<section id="modules"')])
    assert overview in words(explained._repr_html_())
    assert "rule '<0|0' leaves it in the model's precision" in overview
    assert "1 linear 0 In one line" in overview, "the module 0 is no line number"


def test_a_comparison_shows_the_numerics_of_the_page_and_the_terminals_table(explained):
    found = comparison(LAYERS, worst=LAYERS[1:2])
    page = render(explained, found)
    numerics = page[page.index('<section id="numerics"') : page.index("<h2>Linears")].partition(">")[2]
    shown = found._repr_html_()
    assert words(numerics) in words(shown) and "Suggested rules" in words(shown)
    header, *rows = cells(shown)
    assert header == ["module", "source", "M x N x K", "output", "dx", "x", "flushed", "amax of x"]
    assert [row[0] for row in rows] == [row.module for row in found.rows] == [LAYERS[1], LAYERS[2], LAYERS[0]]


def test_recipes_are_a_table():
    header, row = cells(RecipesCompared([comparison(LAYERS)])._repr_html_())
    assert (header[0], row[0], row[header.index("worst linear")]) == ("recipe", "float8_current_scaling", LAYERS[2])


def test_nothing_runs_and_nothing_leaves_its_place(explained):
    """A notebook runs no script of an output, and has styles of its own."""
    for found in (explained, comparison(LAYERS), RecipesCompared([comparison(LAYERS)])):
        text = found._repr_html_()
        assert not re.search(r"<script|<fc>|\bid=|https?:", text)
        style = re.search(r"<style>(.*?)</style>", text, re.DOTALL)[1]
        assert all(
            selector.strip().startswith(".te-dynamo ") or selector.strip() == ".te-dynamo"
            for selectors in re.findall(r"([^{}]+)\{", style)
            for selector in selectors.split(",")
        )
