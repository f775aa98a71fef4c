"""require_coverage where there is no graph: te_dynamo.compile, explain and the assert_* methods hold code to it that Dynamo does not compile."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed

import te_dynamo
from te_dynamo.errors import CoverageError


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for e, expert in enumerate(self.experts):
            x = x.index_add(0, rows := torch.where(x[:, e] > 0)[0], expert(x[rows]))
        return x


class Disabled(nn.Linear):
    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class Beside(nn.Module):
    """A linear in a graph, and another part."""

    def __init__(self, part: nn.Module, width: int = 32) -> None:
        super().__init__()
        self.up, self.down, self.part = nn.Linear(32, width), nn.Linear(width, 32), part

    def forward(self, x: Tensor) -> Tensor:
        return self.part(self.down(self.up(x)))


class Prints(nn.Module):
    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        return x.clone()


disabled = Disabled(32, 32)


def held(model: Any, least: float = 0.9, **given: Any) -> Any:
    torch._dynamo.reset()
    return te_dynamo.compile(model, codegen="eager", require_coverage=least, **given)


X = torch.randn(16, 32)
SKIPPED = r"experts\.0, .*experts\.1 ran in no graph:.*output shape depends on input Tensor data.*fullgraph=True"
DISABLED = r"ran in no graph:\n    Dynamo left .*Disabled\.forward is disabled for the compiler"


@pytest.mark.one_fast_case
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Experts, SKIPPED),
        (lambda: Beside(Experts()), SKIPPED),
        (lambda: Disabled(32, 32), DISABLED),
        (lambda: Beside(Disabled(32, 32)), f"part {DISABLED}"),
        (lambda: lambda x: disabled(x), r"code ran in no graph:\n    Skip inlining"),
    ],
    ids=["skipped", "a part is skipped", "disabled", "a part is disabled", "a disabled function"],
)  # fmt: skip
def test_code_in_no_graph_is_an_error(make: Any, message: str) -> None:
    compiled = held(make())
    for size in (16, 16, 24):  # the second call compiles nothing, the third what is in a graph
        with pytest.raises(CoverageError, match=f"(?s)require_coverage asks for 90.0%, and .*{message}"):
            compiled(torch.randn(size, 32))


@pytest.mark.one_fast_case
@pytest.mark.parametrize("function", [False, True])
def test_dynamos_limit_is_an_error(function: bool) -> None:
    model = nn.Linear(32, 32)

    def call(x: Tensor) -> Tensor:
        return model(x).relu()

    compiled = held(call if function else Beside(model), dynamic=False)
    for size in range(2, 10):
        compiled(torch.randn(size, 32))
    with pytest.raises(CoverageError, match=r"(?s)ran in no graph:.*Dynamo has compiled .* 8 times, its limit"):
        compiled(torch.randn(10, 32))
    torch._dynamo.reset()
    compiled(torch.randn(10, 32))


def test_what_holds_no_linear_may_run_in_no_graph() -> None:
    held(Beside(Prints()))(X)
    held(Prints())(X)
    held(Beside(Disabled(32, 32), width=2048))(X)  # 1 of 129 parts
    held(torch.sin, 1.0)(X)


def test_it_is_what_torch_compile_gives() -> None:
    model = Beside(nn.Linear(32, 32))
    compiled = held(model, 1.0)
    assert isinstance(compiled, torch._dynamo.OptimizedModule) and compiled._orig_mod is model
    assert torch.equal(compiled(X), te_dynamo.compile(model, codegen="eager")(X))
    assert list(copy.deepcopy(compiled).state_dict()) == list(compiled.state_dict())
    compiled(X).sum().backward()
    assert torch.compile(lambda x: compiled(x), backend="eager", fullgraph=True)(X).shape == X.shape
    with torch.compiler.set_stance("force_eager"):
        compiled(X)


@pytest.mark.one_fast_case
@pytest.mark.parametrize("device", [None, "h200"])
@pytest.mark.parametrize("make", [Experts, lambda: Disabled(32, 32), lambda: Beside(Disabled(32, 32))])
def test_explain_and_the_contract_hold_to_it(make: Any, device: str | None) -> None:
    options = {"codegen": "eager", "require_coverage": 0.9}
    with pytest.raises(CoverageError, match=r"90\.0% were asked for"):
        te_dynamo.explain(make(), X, options=options, device=device)
    with pytest.raises(CoverageError, match=r"90\.0% were asked for"):
        te_dynamo.explain(held(make()), X, device=device)
    with pytest.raises(CoverageError, match=r"90\.0% were asked for"):
        te_dynamo.explain(make(), X, options={"codegen": "eager"}, device=device).assert_coverage(0.9)


def test_a_function_is_held_to_it_by_explain() -> None:
    with pytest.raises(CoverageError, match=r"90\.0% were asked for"):
        te_dynamo.explain(lambda x: disabled(x), X, options={"codegen": "eager", "require_coverage": 0.9})


def test_a_graph_with_too_little_is_an_error_as_by_torch_compile() -> None:
    with pytest.raises(BackendCompilerFailed, match="CoverageError"):
        held(nn.Linear(32, 30))(X)
