"""torch's FLOP counter counts te operations as it counts the same linears of torch.nn, forward and backward."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode, flop_registry

import te_dynamo
from te_dynamo import nn as te_nn
from te_dynamo.dialect.gemm import ARGUMENTS, gemm_gated
from te_dynamo.quantized.quantizers import Float8CurrentScalingQuantizer

M, K, N, G = 256, 128, 512, 2


def counted(module: nn.Module, *others: object) -> int:
    x = torch.randn(M, K, dtype=torch.bfloat16, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        module(x, *others).sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("recipe", te_dynamo.recipe.names())
def test_linears(recipe: str) -> None:
    same = counted(nn.Linear(K, N, dtype=torch.bfloat16))
    assert same == 3 * 2 * M * N * K == counted(te_nn.Linear(K, N, recipe=recipe, params_dtype=torch.bfloat16))
    basic = te_dynamo.Sequential(te_dynamo.ops.BasicLinear(K, N), recipe=recipe, dtype=torch.bfloat16)
    assert counted(basic) == same


@pytest.mark.parametrize("recipe", ["float8_current_scaling", "float8_block_scaling"])
def test_experts(recipe: str) -> None:
    """With scales of blocks, weight gradients are summed over tokens that are padded by up to 128 for each expert but one."""
    padded = 0 if recipe == "float8_current_scaling" else 128 * (G - 1)
    experts = te_nn.GroupedLinear(G, K, N, recipe=recipe, params_dtype=torch.bfloat16)
    assert counted(experts, [200, M - 200]) == 2 * N * K * (3 * M + padded)


def test_every_product_has_a_formula() -> None:
    assert {operation.overloadpacket for operation in ARGUMENTS} <= set(flop_registry)

    def operand(rows: int) -> list[Tensor]:
        return list(torch.ops.te.quantize(torch.randn(rows, K, dtype=torch.bfloat16), quantizer))

    quantizer = Float8CurrentScalingQuantizer(columnwise=False)
    codes, scales = zip(*(operand(N // 2) for _ in range(2)), strict=True)
    with FlopCounterMode(display=False) as counter:
        gemm_gated(operand(M), quantizer, [torch.cat(codes), torch.cat(scales)], quantizer, False, 0, "silu")
    assert counter.get_total_flops() == 2 * M * N * K


def test_explain_counts_them() -> None:
    model = nn.Sequential(te_nn.Linear(K, N, params_dtype=torch.bfloat16), nn.Linear(N, K, dtype=torch.bfloat16))
    options = {"codegen": "eager", "rules": [("^1$", None)]}
    explained = str(te_dynamo.explain(model, torch.randn(M, K, dtype=torch.bfloat16), options=options))
    assert explained.startswith("coverage 50.0% of linear FLOPs") and "the rows are 100.0% of the model's" in explained
