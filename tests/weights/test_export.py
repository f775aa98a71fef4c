"""Exports of frozen models: refused, since an export reads what is in the weights' place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import te_dynamo

EXPORTS: dict[str, Callable[..., Any]] = {
    "export": torch.export.export,
    "strict": lambda model, args: torch.export.export(model, args, strict=True),
    "trace": torch.jit.trace,
}


@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("export", EXPORTS)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_frozen_model_is_not_exported(export: str, drop: bool) -> None:
    model = nn.Sequential(nn.Linear(64, 64)).bfloat16().requires_grad_(False)
    x = torch.randn(8, 64, dtype=torch.bfloat16)
    expected = model(x)
    te_dynamo.freeze(model, drop_weights=drop)
    with pytest.raises(Exception, match=r"te_dynamo.unfreeze\(model\) first"):
        EXPORTS[export](model, (x,))
    te_dynamo.unfreeze(model)
    assert torch.equal(torch.export.export(model, (x,)).module()(x), expected)


def test_a_quantized_tensor_is_frozen_already() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).bfloat16().requires_grad_(False)
    stored = te_dynamo.Float8CurrentScalingQuantizer(columnwise=False).quantize(model[0].weight)
    model[0].weight = nn.Parameter(stored, requires_grad=False)
    te_dynamo.freeze(model)
    compiled = torch.compile(model, backend="te", options={"codegen": "eager"})
    with te_dynamo.capture() as graphs:
        compiled(torch.randn(8, 64, dtype=torch.bfloat16))
    assert [kept.weight for kept in graphs.reports[0].workspaces] == ["1.weight"]
    assert all(match.matched for match in graphs.reports[0].matches)
