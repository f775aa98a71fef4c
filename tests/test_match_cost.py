"""Linears whose weight costs more to quantize than their few rows repay: they stay in bf16 on a GPU, and say so."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from _match import Matched
from torch import nn

import te_dynamo
from te_dynamo.fake_cuda import fake_cuda
from te_dynamo.passes.match.cost import linear_cost_reason
from te_dynamo.recipe import Float8BlockScaling, Float8CurrentScaling, MXFP8BlockScaling, NVFP4BlockScaling, Recipe

pytestmark = pytest.mark.cost_rule

BF16 = torch.bfloat16
TRAINING = ("fprop", "dgrad", "wgrad")
FP8 = "float8_current_scaling"
FAST_SUMS = Float8CurrentScaling(fprop_fast_accum=True)


def on_cuda(rows: int, learns: bool = True, dtype: torch.dtype = BF16, **options) -> Matched:
    """A linear 4096 -> 14336 of that many rows, on fake CUDA tensors."""
    compiled = Matched(F.linear, **options)
    with fake_cuda():
        x = torch.empty(rows, 4096, dtype=dtype, device="cuda", requires_grad=learns)
        compiled(x, torch.empty(14336, 4096, dtype=dtype, device="cuda", requires_grad=learns))
    return compiled


@pytest.mark.parametrize(
    ("rows", "learns", "matched"),
    [(1, False, False), (512, False, False), (1536, False, True), (256, True, False), (512, True, True)],
)
def test_few_rows_do_not_repay_the_weight(rows: int, learns: bool, matched: bool) -> None:
    compiled = on_cuda(rows, learns)
    assert [record.matched for record in compiled.records] == [matched]
    assert ("te.linear" in compiled.text()) == matched


def test_fast_sums_in_forward_repay_it_with_fewer_rows() -> None:
    assert not on_cuda(960, learns=False).records[0].matched
    assert on_cuda(960, learns=False, recipe=FAST_SUMS).records[0].matched


def test_the_reason_has_both_times_and_what_to_do() -> None:
    assert on_cuda(64, learns=False).reasons() == [
        "64 rows are too few: quantizing its weight takes 70 us, FP8 GEMMs save 4 us; te_dynamo.freeze keeps it quantized "
        "(estimated for an H200); a rule that names it has it in FP8 all the same"
    ]
    assert 'weight_cache="step" keeps it for a step' in on_cuda(64).reasons()[0]


@pytest.mark.parametrize(
    "options", [{"rules": [("", FP8)]}, {"weight_cache": "step"}, {"recipe": "nvfp4"}, {"recipe": "mxfp8"}], ids=str
)
def test_not_asked(options: dict) -> None:
    """A rule names it, its weight is kept for a step, a recipe that is emulated was chosen for its numbers."""
    assert on_cuda(16, **options).records[0].matched


def test_not_asked_of_fp32_nor_of_the_cpu() -> None:
    assert on_cuda(16, dtype=torch.float32).records[0].matched
    compiled = Matched(F.linear)
    compiled(torch.randn(16, 32).bfloat16(), torch.randn(64, 32).bfloat16())
    assert compiled.records[0].matched


def test_linears_of_one_weight_share_its_cost() -> None:
    compiled = Matched(lambda x, y, w: F.linear(x, w) + F.linear(y, w))
    with fake_cuda():
        compiled(
            *(torch.empty(600, 4096, dtype=BF16, device="cuda") for _ in "xy"),
            torch.empty(4096, 4096, dtype=BF16, device="cuda"),
        )
    assert [record.matched for record in compiled.records] == [True, True]


def test_a_frozen_weight_costs_nothing() -> None:
    for frozen in (False, True):
        with fake_cuda(), torch.no_grad():
            model = nn.Linear(64, 128, bias=False, dtype=BF16, device="cuda")
            if frozen:
                te_dynamo.freeze(model)
            compiled = Matched(model)
            compiled(torch.empty(16, 64, dtype=BF16, device="cuda"))
        assert [record.matched for record in compiled.records] == [frozen]


@pytest.mark.parametrize(
    "recipe",
    [Float8CurrentScaling(), FAST_SUMS, Float8BlockScaling(), MXFP8BlockScaling(scale_block=128)],
    ids=Recipe.describe,
)
@pytest.mark.parametrize("gemms", [TRAINING, ("fprop", "dgrad"), ("fprop",)], ids=len)
def test_more_rows_repay_what_fewer_do(recipe: Recipe, gemms: tuple[str, ...]) -> None:
    """Between none and enough of them lies one border, the same for every N and K."""
    enough = 2100 if isinstance(recipe, MXFP8BlockScaling) else 1100
    worth = [linear_cost_reason(m, 4096, 14336, gemms, recipe) == "" for m in range(1, enough + 1)]
    assert worth == sorted(worth) and not worth[200] and worth[-1]
    assert worth == [linear_cost_reason(m, 256, 64, gemms, recipe) == "" for m in range(1, enough + 1)]
    assert linear_cost_reason(1, 4096, 14336, gemms, NVFP4BlockScaling()) == ""


def test_slower_gemms_ask_for_more_rows() -> None:
    """Blocks of 1x128 by 1x128, and E8M0 scales, multiply at little more than bf16's speed, though their weights are read once only."""
    block, e8m0 = Float8BlockScaling(), MXFP8BlockScaling(scale_block=128)
    for rows, block_is_worth in ((700, False), (800, True), (1900, True)):
        assert (linear_cost_reason(rows, 4096, 4096, ("fprop",), block) == "") == block_is_worth
        assert linear_cost_reason(rows, 4096, 4096, ("fprop",), e8m0)
    assert not linear_cost_reason(500, 4096, 4096, TRAINING, block)
    assert linear_cost_reason(500, 4096, 4096, TRAINING, e8m0)
