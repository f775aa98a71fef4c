"""te_dynamo/rules/places.py: which paths a pattern with places finds, and which texts between braces are none."""

from __future__ import annotations

import pytest
from torch import nn

from te_dynamo.errors import InvalidOptionError
from te_dynamo.options import Options
from te_dynamo.rules.places import check, expression, has_places, lists_of, taken
from te_dynamo.user_code import paths_of


class Block(nn.Module):
    def __init__(self, experts: int) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(experts))


class Model(nn.Module):
    """Seven blocks of four experts, two blocks of two, and a list of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(4) for _ in range(7))
        self.decoder = nn.ModuleDict({"h": nn.Sequential(Block(2), nn.ReLU(), Block(2))})
        self.w = nn.ParameterList(nn.Linear(8, 8).weight for _ in range(3))
        self.lm_head = nn.Linear(8, 8)


MODEL = Model()
PATHS = list(paths_of(MODEL))


def found(pattern: str) -> str:
    return " ".join(taken(expression(pattern, lists_of(PATHS)), PATHS))


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        (r"layers.{0}", "layers.0"),
        (r"layers\.{-1}\.up", "layers.6"),
        (r"^layers.{:2}.*", "layers.0 layers.1"),
        (r"layers.{-4:}.*up", "layers.3 layers.4 layers.5 layers.6"),
        (r"layers.{-15%:}.*", "layers.5 layers.6"),  # 1.05 blocks
        (r"layers.{-100%:}$", " ".join(f"layers.{i}" for i in range(7))),
        (r"layers.{:14.5%}.", "layers.0 layers.1"),
        (r"layers.{50%:}.up", "layers.4 layers.5 layers.6"),
        (r"layers.{-50%:-15%}$", "layers.3 layers.4"),
        (r"layers.{::3}$", "layers.0 layers.3 layers.6"),
        (r"layers.{1:-1:2}$", "layers.1 layers.3 layers.5"),
        (r"layers.({0}|{-1}).up", "layers.0 layers.6"),
        (r"layers.{-1:}.experts.{-25%:}", "layers.6.experts.3"),
        (r"^layers.{0}.*{-1}$", "layers.0.experts.3"),
        (r"h.{-1}$", "decoder.h.2"),
        (r"h.{-60%:}.up", "decoder.h.2"),  # of three: the ReLU has a number too
        (r"experts.{2}$", " ".join(f"layers.{i}.experts.2" for i in range(7))),
        (r"w.{-1}", "w.2"),
        (r"layers.{7:}", ""),
        (r"layers.{7}", ""),
        (r"up.{0}", ""),
        (r"ayer.{0}", ""),
    ],
)
def test_what_a_pattern_finds(pattern: str, expected: str) -> None:
    check(pattern)
    assert has_places(pattern) and found(pattern) == expected


def test_the_whole_model_is_a_list() -> None:
    paths = list(paths_of(nn.Sequential(*(nn.Sequential(nn.Linear(8, 8)) for _ in range(12)))))
    assert taken(expression("^{-15%:}", lists_of(paths)), paths) == ["10", "11"]
    assert taken(expression("{-1}$", lists_of(paths)), paths) == [*(f"{i}.0" for i in range(11)), "11"]


@pytest.mark.parametrize("pattern", [r"layers\.\d{1,2}\.", r"\d{2}", r"^.{,3}$", "a{2}", r"\{0\}", "[qkv]{1}_proj"])
def test_counts_stay_counts(pattern: str) -> None:
    check(pattern)
    assert not has_places(pattern) and expression(pattern, lists_of(PATHS)) == pattern


@pytest.mark.parametrize(
    ("place", "why"),
    [
        ("last", "it is no slice"),
        ("", "it is no slice"),
        ("-15%", "a percentage alone is no module"),
        ("1.5:", "it is no slice"),
        ("::0", "it is no slice"),
        ("::50%", "it is no slice"),
        ("-4:,", "it is no slice"),
        (":120%", "120% is more than all"),
        ("-0%:", "Python reads -0% as 0, the start of the list"),
        ("-0:", "Python reads -0 as 0, the start of the list"),
    ],
)
def test_no_place(place: str, why: str) -> None:
    text = rf"te_dynamo: '{{{place}}}' in 'layers\.{{{place}}}\.up' is no place in a list of modules: {why}; expected a number or a slice"
    with pytest.raises(InvalidOptionError) as error:
        Options.parse({"rules": [("lm_head", None), (rf"layers\.{{{place}}}\.up", None)]})
    assert str(error.value).replace("\\\\", "\\").startswith(text) and str(error.value).endswith("(in rules[1])")


def test_an_expression_around_places_is_checked() -> None:
    with pytest.raises(InvalidOptionError, match="is not a regular expression: missing"):
        check("(layers.{-15%:}")
