"""te_dynamo.compile: the same as torch.compile with backend="te", its options typed and checked at once."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import nn

import te_dynamo
from te_dynamo.errors import InvalidOptionError
from te_dynamo.options import OWN, UNSET, Options


def test_its_keywords_are_the_options() -> None:
    parameters = inspect.signature(te_dynamo.compile).parameters
    assert set(parameters) == {"model", *OWN, "inductor", "mode", "dynamic", "fullgraph"}
    default = {name: parameters[name].default for name in OWN if parameters[name].default is not UNSET}
    assert Options.parse(default) == Options.parse()


def test_what_it_compiles_is_what_torch_compile_does() -> None:
    model, x = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)), torch.randn(16, 32)
    compiled = te_dynamo.compile(model, codegen="eager", rules=[("2", None)], fullgraph=True)
    expected = torch.compile(model, backend="te", options={"codegen": "eager", "rules": [("2", None)]})
    with te_dynamo.capture() as graphs:
        assert torch.equal(compiled(x), expected(x))
    assert [row.matched for row in graphs.reports[0].matches if row.kind == "linear"] == [True, False]


def test_a_mode_and_options_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile takes one of them."""
    given: dict[str, Any] = {}
    monkeypatch.setattr(torch, "compile", lambda model, **kwargs: given.update(kwargs) or model)
    te_dynamo.compile(torch.sin, mode="reduce-overhead", inductor={"max_autotune": True}, recipe="mxfp8")
    assert given["options"]["triton.cudagraphs"] is True and given["options"]["max_autotune"] is True
    assert given["options"]["recipe"] == "mxfp8" and given["backend"] == "te"


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        (
            {"recipe": "xfp8"},
            "valid: 'float8_block_scaling', 'float8_current_scaling', 'float8_rowwise', 'mxfp8', 'nvfp4'",
        ),
        ({"rules": [("(", None)]}, "is not a regular expression"),
        ({"fusions": ["fuse_gemm_bia"]}, "unknown fusion 'fuse_gemm_bia'; did you mean 'fuse_gemm_bias'"),
        ({"mode": "fast"}, "unknown mode 'fast'"),
        ({"inductor": {"max_autotone": True}}, "unknown option 'max_autotone'"),
        (
            {"inductor": {"recipe": "mxfp8"}},
            "inductor= takes options of Inductor's own; 'recipe' is a keyword beside it",
        ),
        ({"rules": None}, "rules must be a list of .* got None"),
        ({"require_coverage": 2}, "takes a share from 0 to 1"),
        ({"recpie": "mxfp8"}, r"unknown keyword 'recpie'; did you mean 'recipe'\?"),
    ],
)
def test_a_mistake_is_an_error_at_once(keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidOptionError, match=message):
        te_dynamo.compile(nn.Linear(32, 32), **keywords)
