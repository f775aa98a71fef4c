"""What multiplies by weights in one call of torch's has a row for each, and exported models' overloads are linears."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from helpers.graphs.matching import Matched
from torch import Tensor, nn


class Baddbmm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 32, 16))

    def forward(self, x: Tensor) -> Tensor:
        return torch.baddbmm(x.new_zeros(1), x.expand(2, *x.shape), self.weight)


CASES: dict[str, tuple[Callable[[], nn.Module], str, list[tuple[str, ...]]]] = {
    "gru_cell": (lambda: nn.GRUCell(32, 16), "gru_cell", [("4", "48", "32"), ("4", "48", "16")]),
    "lstm_cell": (lambda: nn.LSTMCell(32, 16), "lstm_cell", [("4", "64", "32"), ("4", "64", "16")]),
    "rnn_cell": (lambda: nn.RNNCell(32, 16), "rnn_tanh_cell", [("4", "16", "32"), ("4", "16", "16")]),
    "bilinear": (lambda: nn.Bilinear(32, 32, 16), "bilinear", [("4", "16", "1024")]),
    "baddbmm": (Baddbmm, "baddbmm", [("8", "16", "32")]),
}


@pytest.mark.parametrize("case", CASES)
def test_recorded(case: str) -> None:
    make, name, sizes = CASES[case]
    model, x = make(), torch.randn(4, 32)
    inputs = (x, x) if case == "bilinear" else (x,)
    compiled = Matched(model)
    torch.testing.assert_close(compiled(*inputs), model(*inputs))
    assert [record.shape for record in compiled.records] == sizes
    assert set(compiled.reasons()) == {f"inside torch.{name}, which te_dynamo does not take apart"}


@pytest.mark.parametrize("decomposed", [False, True])
def test_exported_models(decomposed: bool) -> None:
    model, x = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32, bias=False)), torch.randn(4, 32)
    program = torch.export.export(model, (x,))
    if decomposed:
        program = program.run_decompositions()
    compiled = Matched(program.module())
    torch.testing.assert_close(compiled(x), model(x))
    assert [record.matched for record in compiled.records if record.kind == "linear"] == [True, True]
