"""Reasons for which something stays in the user's precision, each with the situation that brings it about; others stand beside their patterns."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.graphs.matching import Matched
from torch import Tensor, nn


class Model(nn.Module):
    """`call` says how its weight is read."""

    def __init__(self, call: Callable[..., Any], rows: int = 32, device: str = "cpu") -> None:
        super().__init__()
        self.call, self.weight = call, nn.Parameter(torch.randn(rows, 32, device=device))

    def forward(self, *tensors: Tensor) -> Any:
        return self.call(self.weight, *tensors)


def gelu_by_columns(weight: Tensor, x: Tensor) -> Any:
    h = F.gelu(F.linear(x, weight).t())
    return F.linear(h, weight), h.as_strided((4,), (1,))


X = torch.randn(32, 32)
DYNAMIC = r"its weight has the dynamic shape \[s\d+, 32\]; te.linear needs N and K fixed"
SITUATIONS: dict[str, tuple[str, Callable[..., Any], str]] = {
    "layer_norm of two dimensions": (
        "layer_norm", lambda w, x: F.linear(F.layer_norm(x, (32, 32)), w), "it normalizes 2 dimensions; te.layer_norm takes the last",
    ),
    "strides": ("gelu", gelu_by_columns, r"its result has the strides \[1, 32\] and is read by other than linears; left to Inductor"),
    "vmap": ("linear", lambda w, x: torch.vmap(lambda row: F.linear(row, w))(x), "inside a torch.func transform"),
}  # fmt: skip


@pytest.mark.parametrize("situation", SITUATIONS)
def test_the_situation_has_the_reason(situation: str) -> None:
    kind, call, reason = SITUATIONS[situation]
    compiled = Matched(Model(call))
    torch.testing.assert_close(compiled(X), compiled.module(X))
    assert any(re.fullmatch(reason, found) for found in compiled.reasons(kind)), compiled.reasons(kind)


@pytest.mark.parametrize(
    ("call", "rows"),
    [
        (lambda w, x: torch.vmap(lambda row: F.linear(row, w))(x), 32),
        (lambda w, x: torch.vmap(torch.vmap(lambda row: F.linear(row, w)))(x.view(4, 8, 32)), 32),
        (lambda w, x: torch.vmap(F.linear, in_dims=(None, 0))(x, w.view(8, 4, 32)), 8 * 32),
        (lambda w, x: torch.func.vjp(lambda x: F.linear(x, w), x)[0], 32),
    ],
    ids=["vmap", "vmap of vmap", "weights of an ensemble", "vjp"],
)
def test_a_transformed_linear_has_the_size_of_all_elements(call: Callable[..., Any], rows: int) -> None:
    compiled = Matched(Model(call))
    torch.testing.assert_close(compiled(X), compiled.module(X))
    (record,) = compiled.records
    assert record.flops == 2 * X.numel() * 32 and int(record.shape[0]) == rows and not record.matched


@pytest.mark.parametrize(
    "call",
    [
        lambda w, x, sized: F.linear(x, w[: sized.shape[0]]),
        lambda w, x, sized: torch.einsum("bd,nd->bn", x, w[: sized.shape[0]]),
    ],
    ids=["linear", "einsum"],
)
def test_a_weight_whose_shape_changes(call: Callable[..., Any]) -> None:
    torch._dynamo.mark_dynamic(sized := torch.randn(48), 0)
    compiled = Matched(Model(call, rows=64))
    compiled(X, sized)
    (reason,) = compiled.reasons()
    assert re.fullmatch(DYNAMIC, reason)


def test_a_norm_over_a_dimension_that_changes() -> None:
    torch._dynamo.mark_dynamic(x := torch.randn(4, 48), 1)
    compiled = Matched(lambda x: F.layer_norm(x, (x.shape[-1],)))
    compiled(x)
    (reason,) = compiled.reasons("layer_norm")
    assert re.fullmatch(r"its last dimension is dynamic \(s\d+\)", reason)


def test_operands_of_two_precisions_which_torch_refuses_too() -> None:
    compiled = Matched(Model(lambda w, x: F.linear(x, w)))
    with pytest.raises(RuntimeError, match="same dtype"):
        compiled(X.bfloat16())
    assert compiled.reasons() == ["its operands are bf16 and fp32 without autocast"]


def test_another_device() -> None:
    compiled = Matched(Model(lambda w, x: F.linear(x, w), device="meta"))
    compiled(X.to("meta"))
    assert compiled.reasons() == [
        "on the device 'meta'; te_dynamo runs on cuda and cpu; te_dynamo.explain(.., device=\"h200\") needs no GPU"
    ]
