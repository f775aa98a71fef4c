"""TE_DYNAMO_DISABLE and TE_DYNAMO_RECIPE: the off switch, and the recipe of code that names none."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import te_dynamo
from te_dynamo import options as options_module
from te_dynamo.errors import InvalidOptionError
from te_dynamo.options import Options

X = torch.randn(32, 32)


@pytest.fixture(autouse=True)
def said_anew() -> None:
    options_module._warn_disabled.cache_clear()


def test_the_off_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The numbers are the model's own, whatever the code asks for, and one warning says so."""
    monkeypatch.setenv("TE_DYNAMO_DISABLE", "1")
    model = nn.Linear(32, 32)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compiled = te_dynamo.compile(
            model, recipe="mxfp8", rules=[("", "nvfp4")], codegen="eager", require_coverage=0.9
        )
        assert torch.equal(compiled(X), model(X))
    told = [str(each.message) for each in caught if "TE_DYNAMO_DISABLE" in str(each.message)]
    assert told == ["te_dynamo: TE_DYNAMO_DISABLE=1 is set: every linear stays in the model's precision"]
    assert te_dynamo.explain(model, X).linears[0].reason == "TE_DYNAMO_DISABLE=1 is set"


def test_another_value_turns_nothing_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TE_DYNAMO_DISABLE", "0")
    assert Options.parse().recipe is not None


@pytest.mark.parametrize("name", ["mxfp8", "none"])
def test_the_default_recipe(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("TE_DYNAMO_RECIPE", name)
    expected = None if name == "none" else "mxfp8"
    model = nn.Linear(32, 32)
    for compiled in (
        torch.compile(model, backend="te", options={"codegen": "eager"}), te_dynamo.compile(model, codegen="eager"),
    ):  # fmt: skip
        (row,) = te_dynamo.explain(compiled, X).linears
        assert (row.recipe or None) == expected


def test_what_code_says_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TE_DYNAMO_RECIPE", "mxfp8")
    (row,) = te_dynamo.explain(te_dynamo.compile(nn.Linear(32, 32), recipe="nvfp4", codegen="eager"), X).linears
    assert row.recipe == "nvfp4"
    assert Options.parse({"recipe": None}).recipe is None


def test_a_wrong_default_names_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TE_DYNAMO_RECIPE", "mxfp9")
    with pytest.raises(InvalidOptionError, match=r"unknown recipe 'mxfp9'; did you mean 'mxfp8'\? .*TE_DYNAMO_RECIPE"):
        te_dynamo.compile(nn.Linear(32, 32))
