"""Where the pipeline times products: before each graph is lowered, where the mode asks for it, and with tensors that have data."""

from __future__ import annotations

import pytest
import torch
from torch import nn


@pytest.mark.parametrize(("options", "graphs"), [({"max_autotune": True}, 2), ({}, 0)])
def test_forward_and_backward_are_timed(monkeypatch: pytest.MonkeyPatch, options: dict[str, bool], graphs: int) -> None:
    made: list[type] = []
    monkeypatch.setattr("te_dynamo.backend.tune", lambda graph: made.append(type(torch.ones(1))))
    torch._dynamo.reset()
    with torch._inductor.config.patch(force_disable_caches=True):
        model = torch.compile(nn.Linear(32, 64), backend="te", options=options)
        model(torch.randn(16, 32, requires_grad=True)).sum().backward()
    assert made == graphs * [torch.Tensor], "a fake tensor cannot be timed"
