"""What would make our passes quadratic in a model's depth: reading the whole graph, or all that it returns, for each match."""

from __future__ import annotations

import pytest
import torch
from helpers.graphs.traced_graphs import BOTH, graph_of, te
from helpers.models.snapshot_models import SwigluMLP, compiled_run, kernels_everywhere
from torch import nn

from te_dynamo.lowering.lower import lower
from te_dynamo.passes.torch_ir.match import mutation
from te_dynamo.testing import fake_cuda


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(SwigluMLP() for _ in range(3)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x)


def test_writes_are_looked_up_once_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not once for each norm and activation: three blocks have six."""
    graphs = []
    effects = mutation._effects
    monkeypatch.setattr(mutation, "_effects", lambda graph: graphs.append(graph) or effects(graph))
    compiled_run(Deep, {"codegen": "eager"})(torch.randn(16, 64, dtype=torch.bfloat16))
    assert len(graphs) == 1


def test_lowering_exchanges_what_a_graph_returns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not once for each result: of this graph all twelve are returned."""
    exchanged = []
    replace = torch.fx.Node.replace_all_uses_with

    def noting(self: torch.fx.Node, *args: object, **kwargs: object) -> list[torch.fx.Node]:
        users = replace(self, *args, **kwargs)  # type: ignore[arg-type]
        exchanged.extend(user for user in users if user.op == "output")
        return users

    monkeypatch.setattr(torch.fx.Node, "replace_all_uses_with", noting)
    with fake_cuda(), kernels_everywhere():
        graph = graph_of(*[(te.quantize, BOTH)] * 4)
        lower(graph)
    assert not exchanged and len(graph.output_node().args[0]) == 12
