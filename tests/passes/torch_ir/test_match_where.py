"""Paths of linears by parameters that a module holds itself: rules, rows and warnings name each."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import te_dynamo


class Block(nn.Module):
    """Two parameters of its own, one in a list, and a linear."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv_w, self.o_w = (nn.Parameter(torch.randn(64, 64) / 8) for _ in range(2))
        self.more = nn.ParameterList([torch.randn(64, 64) / 8])
        self.up = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(F.linear(x, self.qkv_w) @ self.o_w.t()) @ self.more[0]


class Net(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.blocks = how, nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if self.how == "broken":
                x = helped(block, x)
            elif self.how == "checkpointed":
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        return x


def helped(block: nn.Module, x: Tensor) -> Tensor:
    torch._dynamo.graph_break()
    return block(x)


def explained(model: nn.Module, *rules: tuple[str, Any], x: Tensor | None = None) -> te_dynamo.Explanation:
    torch._dynamo.reset()
    x = torch.randn(16, 64, dtype=torch.bfloat16) if x is None else x
    return te_dynamo.explain(model.bfloat16(), x, options={"codegen": "eager", "rules": list(rules)})


def left(model: nn.Module, *rules: tuple[str, Any]) -> set[str]:
    return {row.module for row in explained(model, *rules).linears if not row.matched}


PATHS = [f"blocks.{block}.{name}" for block in range(2) for name in ("qkv_w", "o_w", "up", "more.0")]


@pytest.mark.one_fast_case
@pytest.mark.parametrize("how", ["whole", "checkpointed", "broken"])
def test_each_parameter_has_a_path(how: str) -> None:
    assert sorted(row.module for row in explained(Net(how)).linears) == sorted(PATHS)


@pytest.mark.one_fast_case
@pytest.mark.parametrize("how", ["whole", "checkpointed", "broken"])
def test_a_rule_for_a_parameter_holds_for_it_alone(how: str) -> None:
    assert left(Net(how), (r"^blocks\.1\.o_w$", None)) == {"blocks.1.o_w"}


def test_a_rule_for_the_module_holds_for_its_parameters() -> None:
    assert left(Net("whole"), (r"blocks\.0$", None)) == {"blocks.0.qkv_w", "blocks.0.o_w", "blocks.0.more.0"}


def test_what_is_weight_or_made_of_several_parameters_has_the_modules_path() -> None:
    class Made(nn.Linear):
        def __init__(self) -> None:
            super().__init__(64, 64)
            self.scale = nn.Parameter(torch.ones(64, 64))

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.weight * self.scale)

    parametrized = nn.Linear(64, 64)
    nn.utils.parametrize.register_parametrization(parametrized, "weight", nn.Identity())
    model = nn.Sequential(nn.Linear(64, 64), Made(), parametrized)
    assert [row.module for row in explained(model).linears] == ["0", "1", "2"]


def test_the_projection_that_attention_holds_itself() -> None:
    x = torch.randn(2, 16, 64, dtype=torch.bfloat16)
    layer = nn.TransformerEncoderLayer(64, 4, 64, batch_first=True)
    found = explained(layer, (r"self_attn$", None), x=x).linears
    assert {row.module: row.matched for row in found} == {
        "self_attn.in_proj_weight": False, "self_attn.out_proj": True, "linear1": True, "linear2": True,
    }  # fmt: skip


def test_a_rule_that_names_no_parameter_is_told_near_ones() -> None:
    with pytest.warns(UserWarning, match=r"matches the rule 'qkv_v'; did you mean 'qkv_w'"):
        explained(Net("whole"), ("qkv_v", None))


def test_a_rule_for_a_parameter_behind_a_break_has_an_effect() -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*no module path")
        explained(Net("broken"), (r"blocks\.1\.o_w", None))
