"""What `explain` compiles leaves nothing in Dynamo's tables: neither the next explanation nor what is compiled later depends on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import te_dynamo
from te_dynamo.errors import UnsupportedError

OPTIONS = {"codegen": "eager"}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (nn.Linear(64, 64, dtype=torch.bfloat16) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.nn.functional.gelu(self.up(x)))


class Compiles(nn.Module):
    """A model that compiles a part of itself."""

    def __init__(self, compile_: Callable[[nn.Module], Any]) -> None:
        super().__init__()
        self.block = Block()
        self.part = compile_(self.block)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.block if self.part is None else self.part)(x)


def rows(count: int) -> torch.Tensor:
    return torch.randn(count, 64, dtype=torch.bfloat16)


@pytest.mark.one_fast_case
@pytest.mark.parametrize("device", [None, "h200"])
@pytest.mark.parametrize("in_place", [True, False])
def test_parts_that_the_model_compiles_stay_compiled(device: str | None, in_place: bool) -> None:
    torch._dynamo.reset()
    model = Compiles(
        lambda block: (
            block.compile(backend="te", options=OPTIONS)
            if in_place
            else torch.compile(block, backend="te", options=OPTIONS)
        )
    )
    x = rows(32)
    before = model(x)
    te_dynamo.explain(model, x, options=OPTIONS, device=device)
    torch.testing.assert_close(model(x), before, rtol=0, atol=0)
    with te_dynamo.capture() as graphs:
        model(rows(48))
    assert "te.linear" in graphs["match"]


@pytest.mark.slow
def test_any_number_of_explanations_and_then_a_compilation() -> None:
    torch._dynamo.reset()
    model = Block()
    for _ in range(6):
        assert len(te_dynamo.explain(model, rows(32), options=OPTIONS).reports) == 1
    with te_dynamo.capture() as graphs:
        torch.compile(model, backend="te", options=OPTIONS)(rows(32))
    assert "te.linear" in graphs["match"]


@pytest.mark.one_fast_case
@pytest.mark.parametrize(
    "make", [Block, lambda: nn.Sequential(nn.Linear(64, 64), nn.GELU()).bfloat16()], ids=["Block", "Sequential"]
)
def test_each_explanation_has_the_sizes_that_it_is_given(make: Callable[[], nn.Module]) -> None:
    torch._dynamo.reset()
    model = make()
    for device in ("h200", None):
        for count in (32, 48):
            explained = te_dynamo.explain(model, rows(count), options=OPTIONS, device=device)
            assert {linear.shape[0] for linear in explained.linears} == {str(count)}
    with te_dynamo.capture() as graphs:
        torch.compile(model, backend="te", options=OPTIONS)(rows(80))
    assert "[80, 64]" in graphs["match"] and "s0" not in graphs["match"]


def test_sizes_that_the_users_calls_have_shown_stay_known() -> None:
    torch._dynamo.reset()
    model = Block()
    compiled = torch.compile(model, backend="te", options=OPTIONS)
    compiled(rows(32))
    assert [linear.shape[0] for linear in te_dynamo.explain(model, rows(48), options=OPTIONS).linears] == ["48", "48"]
    with te_dynamo.capture() as graphs:
        compiled(rows(32))
        compiled(rows(64))  # the second size of the user's
    assert "[s" in graphs["match"]


def test_a_size_that_is_marked_as_dynamic_is_so_on_a_gpu_that_is_not_here() -> None:
    x = rows(40)
    torch._dynamo.mark_dynamic(x, 0)
    shapes = {linear.shape[0] for linear in te_dynamo.explain(Block(), x, options=OPTIONS, device="h200").linears}
    assert len(shapes) == 1 and not shapes.pop().isdigit()


class Decides(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if x.sum().item() > 0 else x


def test_a_model_that_asks_for_values_cannot_be_explained_on_a_gpu_that_is_not_here() -> None:
    with pytest.raises(UnsupportedError, match=r"explain\(device=\"h200\"\).*values"):
        te_dynamo.explain(Decides(), rows(32), options=OPTIONS, device="h200")


def test_graphs_of_fake_cuda_do_not_depend_on_those_before() -> None:
    torch._dynamo.reset()
    for count in (512, 8192, 512):
        graphs = te_dynamo.testing.capture_on_fake_cuda(
            Block, lambda device, n=count: (torch.empty(n, 64, dtype=torch.bfloat16, device=device),), options=OPTIONS
        )
        assert f"bf16[{count}, 64]" in graphs["match"]
