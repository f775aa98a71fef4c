"""What multiplies by weights in one call of torch's has a row for each, and exported models' overloads are linears."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from helpers.graphs.matching import Matched
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode


class Baddbmm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 32, 16))

    def forward(self, x: Tensor) -> Tensor:
        return torch.baddbmm(x.new_zeros(1), x.expand(2, *x.shape), self.weight, alpha=2)


class Addbmm(Baddbmm):
    def forward(self, x: Tensor) -> Tensor:
        return x.new_zeros(1).addbmm(x.expand(2, *x.shape), self.weight)


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(32, 64)), nn.Parameter(torch.randn(64, 16))

    def forward(self, x: Tensor) -> Tensor:
        return torch.linalg.multi_dot([x, self.a, self.b])


CASES: dict[str, tuple[Callable[[], nn.Module], str, list[tuple[str, ...]]]] = {
    "gru_cell": (lambda: nn.GRUCell(32, 16), "gru_cell", [("4", "48", "32"), ("4", "48", "16")]),
    "lstm_cell": (lambda: nn.LSTMCell(32, 16), "lstm_cell", [("4", "64", "32"), ("4", "64", "16")]),
    "rnn_cell": (lambda: nn.RNNCell(32, 16), "rnn_tanh_cell", [("4", "16", "32"), ("4", "16", "16")]),
    "bilinear": (lambda: nn.Bilinear(32, 32, 16), "bilinear", [("4", "16", "1024")]),
    "baddbmm": (Baddbmm, "baddbmm", [("8", "16", "32")]),
    "addbmm": (Addbmm, "addbmm", [("8", "16", "32")]),
    "multi_dot": (Chain, "linalg_multi_dot", [("4", "64", "32"), ("4", "16", "64")]),
}


@pytest.mark.parametrize("case", CASES)
def test_recorded(case: str) -> None:
    make, name, sizes = CASES[case]
    model, x = make(), torch.randn(4, 32)
    inputs = (x, x) if case == "bilinear" else (x,)
    compiled = Matched(model)
    torch.testing.assert_close(compiled(*inputs), model(*inputs))
    assert [record.shape for record in compiled.records] == sizes
    advice = "; write it as torch.bmm and a sum" if "bmm" in name else ""
    assert set(compiled.reasons()) == {f"inside torch.{name}, which te_dynamo does not take apart{advice}"}


CONVOLUTIONS: dict[str, tuple[nn.Module, tuple[int, ...], tuple[str, ...]]] = {
    "1x1": (nn.Conv2d(32, 16, 1), (2, 32, 4, 4), ("32", "16", "32")),
    "grouped": (nn.Conv1d(32, 32, 3, groups=32), (2, 32, 10), ("16", "32", "3")),
    "transposed": (nn.ConvTranspose2d(32, 16, 2, stride=2), (2, 32, 4, 4), ("32", "64", "32")),
    "same": (nn.Conv3d(4, 8, 3, padding="same"), (1, 4, 3, 3, 3), ("27", "8", "108")),
}


LINEARS: dict[str, tuple[nn.Module, tuple[int, ...], bool, tuple[str, ...]]] = {
    "1x1": (nn.Conv2d(32, 16, 1), (2, 32, 4, 4), True, ("32", "16", "32")),
    "a pixel": (nn.Conv2d(32, 16, 1), (2, 32, 1, 1), False, ("2", "16", "32")),
    "patches": (nn.Conv2d(4, 32, 4, stride=4), (2, 4, 8, 12), False, ("12", "32", "64")),
    "patches in channels_last": (nn.Conv2d(4, 32, 2, stride=2, bias=False), (2, 4, 8, 8), True, ("32", "32", "16")),
    "tubes": (nn.Conv3d(4, 32, (1, 2, 4), stride=(1, 2, 4), padding="valid"), (2, 4, 3, 4, 8), False, ("24", "32", "32")),
    "frames": (nn.Conv1d(4, 32, 16, stride=16), (2, 4, 64), False, ("8", "32", "64")),
}  # fmt: skip


@pytest.mark.parametrize("case", LINEARS)
def test_convolutions_that_are_linears(case: str) -> None:
    model, shape, channels_last, sizes = LINEARS[case]
    x = torch.randn(shape)
    if channels_last:
        x = x.to(memory_format=torch.channels_last)
    compiled = Matched(nn.Sequential(model, nn.Flatten(2)), run="aot")
    y, expected = compiled(x), compiled.module(x)
    torch.testing.assert_close(y, expected)
    parameters = list(model.parameters())
    torch.testing.assert_close(*(torch.autograd.grad(out.square().sum(), parameters) for out in (y, expected)))
    (record,) = compiled.records
    assert record.matched and record.shape == sizes and record.module == "0"


def test_other_convolutions_are_none() -> None:
    for model, shape in (
        (nn.Conv2d(32, 16, 1, stride=2), (2, 32, 4, 4)),
        (nn.Conv2d(4, 32, 4, stride=4), (2, 4, 9, 8)),
        (nn.Conv2d(4, 32, 4, stride=4, padding=2), (2, 4, 8, 8)),
        (nn.Conv2d(4, 32, 4, stride=4, dilation=2), (2, 4, 8, 8)),
        (nn.Conv2d(32, 32, 1, groups=2), (2, 32, 4, 4)),
    ):
        compiled, x = Matched(model), torch.randn(shape).to(memory_format=torch.channels_last)
        torch.testing.assert_close(compiled(x), model(x))
        assert [record.reason.partition(";")[0] for record in compiled.records] == ["a convolution"]


@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_convolutions(case: str) -> None:
    """Counted as torch's own counter does."""
    model, shape, sizes = CONVOLUTIONS[case]
    compiled, x = Matched(model), torch.randn(shape)
    torch.testing.assert_close(compiled(x), model(x))
    (record,) = compiled.records
    assert record.shape == sizes and record.reason.startswith("a convolution; te_dynamo has linears in recipes")
    with FlopCounterMode(display=False) as counter:
        model(x)
    assert record.flops == counter.get_total_flops()


@pytest.mark.parametrize(("layer", "name"), [(nn.LSTM, "lstm"), (nn.GRU, "gru"), (nn.RNN, "rnn_tanh")])
def test_recurrent_layers_that_are_traced(layer: type[nn.Module], name: str) -> None:
    with torch._dynamo.config.patch(allow_rnn=True):
        compiled = Matched(layer(32, 16))
        compiled(torch.randn(5, 4, 32))
    assert [record.shape[1:] for record in compiled.records] == [
        (str(16 * {"lstm": 4, "gru": 3}.get(name, 1)), k) for k in ("32", "16")
    ]
    advice = "; write it as torch.bmm and a sum" if "bmm" in name else ""
    assert set(compiled.reasons()) == {f"inside torch.{name}, which te_dynamo does not take apart{advice}"}


@pytest.mark.one_fast_case
@pytest.mark.parametrize("decomposed", [False, True])
def test_exported_models(decomposed: bool) -> None:
    model, x = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32, bias=False)), torch.randn(4, 32)
    program = torch.export.export(model, (x,))
    if decomposed:
        program = program.run_decompositions()
    compiled = Matched(program.module())
    torch.testing.assert_close(compiled(x), model(x))
    assert [record.matched for record in compiled.records if record.kind == "linear"] == [True, True]
