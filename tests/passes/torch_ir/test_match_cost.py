"""Linears that cost more to quantize than their rows repay: they stay in bf16 on a GPU, and say so."""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from helpers.graphs.matching import Matched
from helpers.slow import slow_but
from torch import nn

import te_dynamo
from te_dynamo import recipe as recipes
from te_dynamo.kernels.runtime.target import TARGETS
from te_dynamo.passes.torch_ir.match.cost import experts_cost_reason, linear_cost_reason, linear_times
from te_dynamo.rates import H200 as FOUND_ON_AN_H200
from te_dynamo.rates import calibrated, published
from te_dynamo.recipe import Float8BlockScaling, Float8CurrentScaling, MXFP8BlockScaling, NVFP4BlockScaling, Recipe
from te_dynamo.testing.fake_cuda import fake_cuda

pytestmark = pytest.mark.cost_rule

BF16 = torch.bfloat16
TRAINING = ("fprop", "dgrad", "wgrad")
FP8 = "float8_current_scaling"
H200 = published(TARGETS["h200"])
FAST_SUMS = Float8CurrentScaling(fprop_fast_accum=True)


@pytest.fixture(autouse=True)
def endlessly_fast_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """One linear alone keeps a GPU busy for less time than the CPU takes to call it: test_match_cpu_bound.py."""
    monkeypatch.setattr("te_dynamo.passes.torch_ir.match.cpu_known", lambda *_: contextlib.nullcontext())


def on_cuda(rows: int, learns: bool = True, dtype: torch.dtype = BF16, **options) -> Matched:
    """A linear 4096 -> 14336 of that many rows, on fake CUDA tensors."""
    compiled = Matched(F.linear, **options)
    with fake_cuda():
        x = torch.empty(rows, 4096, dtype=dtype, device="cuda", requires_grad=learns)
        compiled(x, torch.empty(14336, 4096, dtype=dtype, device="cuda", requires_grad=learns))
    return compiled


@pytest.mark.parametrize(
    ("rows", "learns", "matched"),
    [
        *((rows, False, False) for rows in (1, 512, 1000)),
        *((rows, False, True) for rows in (1100, 1536)),
        *((rows, True, False) for rows in (256, 680)),
        (760, True, True),
    ],
)
def test_few_rows_do_not_repay_the_weight(rows: int, learns: bool, matched: bool) -> None:
    compiled = on_cuda(rows, learns)
    assert [record.matched for record in compiled.records] == [matched]
    assert ("te.linear" in compiled.text()) == matched


def test_fast_sums_in_forward_repay_it_with_fewer_rows() -> None:
    assert not on_cuda(1000, learns=False).records[0].matched
    assert on_cuda(1000, learns=False, recipe=FAST_SUMS).records[0].matched


def test_the_reason_has_both_times_and_what_to_do() -> None:
    assert on_cuda(64, learns=False).reasons() == [
        "M = 64, N = 14336, K = 4096: bf16 takes 29 us, FP8 104 us, of which quantizing its weight takes 77 us; te_dynamo.freeze "
        "keeps it quantized (estimated for an NVIDIA H200); add a rule for this module to force FP8"
    ]
    assert 'weight_cache="step" keeps it for a step' in on_cuda(64).reasons()[0]


def test_a_record_has_both_times() -> None:
    """A linear that is left takes what bf16 takes."""
    assert [round(us) for us in on_cuda(64, learns=False).records[0].us] == [29, 29]
    bf16, fp8 = on_cuda(8192).records[0].us
    assert fp8 < bf16
    assert on_cuda(8192, recipe="nvfp4").records[0].us == ()


def test_a_weight_that_costs_nothing_need_not_be_kept() -> None:
    assert linear_cost_reason(64, 64, 64, ("fprop",), Float8CurrentScaling(), H200) == (
        "M = 64, N = 64, K = 64: bf16 takes 1 us, FP8 13 us (estimated for an NVIDIA H200); add a rule for this module to force FP8"
    )


@pytest.mark.parametrize(
    "options", [{"rules": [("", FP8)]}, {"weight_cache": "step"}, {"recipe": "nvfp4"}, {"recipe": "mxfp8"}], ids=str
)
def test_not_asked(options: dict) -> None:
    """A rule names it, its weight is kept for a step, a recipe that is emulated was chosen for its numbers."""
    assert on_cuda(16, **options).records[0].matched


def test_not_asked_of_the_cpu() -> None:
    compiled = Matched(F.linear)
    compiled(torch.randn(16, 32).bfloat16(), torch.randn(64, 32).bfloat16())
    assert compiled.records[0].matched


def square(function, inputs: int, weights: int, rows: int = 1300) -> list[bool]:
    """Which linears 4096 -> 4096 are in FP8 in a function of that many x and weights; alone, one needs 1665 rows."""
    compiled = Matched(function)
    with fake_cuda():
        compiled(*(torch.empty(m, 4096, dtype=BF16, device="cuda") for m in [rows] * inputs + [4096] * weights))
    return [record.matched for record in compiled.records]


def test_linears_of_one_weight_share_its_cost() -> None:
    assert square(lambda x, w: F.linear(x, w), 1, 1) == [False]
    assert square(lambda x, y, w: F.linear(x, w) + F.linear(y, w), 2, 1) == [True, True]


def test_linears_of_one_x_share_its_cost() -> None:
    def three(x, q, k, v):
        return F.linear(x, q) + F.linear(x, k) + F.linear(x, v)

    assert square(three, 1, 3, rows=1450) == [True, True, True]
    assert square(lambda x, q, k, v: three(x, q, k, v) + x, 1, 3, rows=1450) == [True, True, True]
    assert (
        square(lambda x, y, z, q, k, v: F.linear(x, q) + F.linear(y, k) + F.linear(z, v), 3, 3, rows=1450)
        == [False] * 3
    )


def test_what_is_left_shares_no_x() -> None:
    """The first is too narrow and stays; the second has x to itself."""
    compiled = Matched(lambda x, a, b: (F.linear(x, a), F.linear(x, b)))
    with fake_cuda():
        x, a, b = (torch.empty(m, 4096, dtype=BF16, device="cuda") for m in (1550, 256, 4096))
        compiled(x, a, b)
    assert [record.matched for record in compiled.records] == [False, False]
    assert linear_cost_reason(1550, 4096, 4096, ("fprop",), Float8CurrentScaling(), H200, x_readers=2) == ""


def test_linears_of_one_x_are_one_product_where_the_format_stacks() -> None:
    """k and v of a grouped attention, which cost a Llama-1B block launches and time when q ran in FP8 without them."""
    all_three = ("fprop", "dgrad", "wgrad")
    for recipe, beside_q in ((Float8CurrentScaling(), True), (Float8BlockScaling(), False)):
        reasons = [linear_cost_reason(4096, 512, 2048, all_three, recipe, H200, x_readers=count) for count in (1, 3)]
        assert [not reason for reason in reasons] == [False, beside_q]


def kept(rows: int, n: int, k: int, recipe: str = FP8, drop: bool = False, frozen: bool = True) -> list[str]:
    """The reasons of a frozen linear's record."""
    with fake_cuda(), torch.no_grad():
        model = nn.Linear(k, n, bias=False, dtype=BF16, device="cuda")
        if frozen:
            te_dynamo.freeze(model, drop_weights=drop)
        compiled = Matched(model, recipe=recipe)
        compiled(torch.empty(rows, k, dtype=BF16, device="cuda"))
    return compiled.reasons()


def test_a_kept_weight_costs_nothing() -> None:
    for rows in (1, 64, 512):
        assert kept(rows, 14336, 4096) == [""]
        assert "us; te_dynamo.freeze keeps it quantized" in kept(rows, 14336, 4096, frozen=False)[0]


def test_a_kept_weight_is_left_where_few_tiles_are_slower() -> None:
    """Block GEMMs at 512 rows: 64 tiles for 132 multiprocessors."""
    assert kept(512, 14336, 4096, "float8_block_scaling") == [""]
    assert kept(512, 4096, 4096, "float8_block_scaling") == [
        "M = 512, N = 4096, K = 4096: bf16 takes 27 us, FP8 42 us, though its weight is kept quantized (estimated for an NVIDIA H200); "
        "add a rule for this module to force FP8"
    ]


def test_a_dropped_weight_stays_in_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("te_dynamo.weights.frozen.is_dropped", lambda parameter: True)
    assert kept(512, 4096, 4096, "float8_block_scaling") == [""]


@pytest.mark.one_fast_case
@pytest.mark.parametrize(
    "recipe",
    [Float8CurrentScaling(), FAST_SUMS, Float8BlockScaling(), MXFP8BlockScaling(scale_block=128)],
    ids=Recipe.describe,
)
@pytest.mark.parametrize("gemms", slow_but(1, [(TRAINING,), (("fprop", "dgrad"),), (("fprop",),)]), ids=len)
def test_more_rows_repay_what_fewer_do(recipe: Recipe, gemms: tuple[str, ...]) -> None:
    """Between none and enough of them lies one border, at fewer rows where N and K are large; a narrow linear has none."""
    borders = []
    for n, k in ((28672, 8192), (14336, 4096), (4096, 4096)):
        worth = [linear_cost_reason(m, n, k, gemms, recipe, H200) == "" for m in range(1, 3001)]
        assert worth == sorted(worth) and not worth[400] and worth[-1]
        borders.append(worth.index(True))
    assert borders == sorted(borders)
    assert all(linear_cost_reason(m, 256, 64, gemms, recipe, H200) for m in (1, 1000, 1_000_000))
    assert linear_cost_reason(1, 4096, 14336, gemms, NVFP4BlockScaling(), H200) == ""


def test_slower_gemms_ask_for_more_rows() -> None:
    """Those of E8M0 scales are little faster than bf16's, though a weight is read once only; backward of blocks is slower too."""
    block, e8m0 = Float8BlockScaling(), MXFP8BlockScaling(scale_block=128)
    for rows, block_is_worth in ((1300, False), (1500, True), (2500, True)):
        assert (linear_cost_reason(rows, 4096, 4096, ("fprop",), block, H200) == "") == block_is_worth
        assert linear_cost_reason(rows, 4096, 4096, ("fprop",), e8m0, H200)
    for rows, is_worth in ((1000, False), (1100, True)):
        assert (linear_cost_reason(rows, 4096, 4096, TRAINING, Float8CurrentScaling(), H200) == "") == is_worth
        assert linear_cost_reason(rows, 4096, 4096, TRAINING, block, H200)


def border(target: str, n: int, k: int, gemms: tuple[str, ...], recipe: Recipe) -> int:
    """The fewest rows that FP8 repays."""
    rates = published(TARGETS[target])
    return 1 + bisect.bisect_left(
        range(1, 100_000), True, key=lambda m: linear_cost_reason(m, n, k, gemms, recipe, rates) == ""
    )


def test_the_computed_table_is_that_of_the_rule(import_benchmark: Callable[[str], ModuleType]) -> None:
    """`python benchmarks/cost_borders.py && python benchmarks/report.py` writes it anew."""
    computed, report = import_benchmark("cost_borders"), import_benchmark("report")
    kept = report.read(report.RESULTS / "cost_borders-cpu-x86-64.json")
    assert kept.rows == [dataclasses.asdict(row) for row in computed.rows()]


def test_the_borders_move_with_the_device() -> None:
    """Memory that is slower beside the tensor cores asks for more rows, tensor cores that are slower beside it for fewer."""
    current, block = Float8CurrentScaling(), Float8BlockScaling()
    found = {
        name: [
            border(name, 4096, 4096, gemms, recipe) for gemms in (("fprop",), TRAINING) for recipe in (current, block)
        ]
        for name in ("h200", "h100", "l40s", "rtx5090")
    }
    assert found == {
        "h200": [1665, 1389, 1002, 1259],
        "h100": [2410, 1820, 1446, 1713],
        "l40s": [2816, 1936, 1686, 1970],
        "rtx5090": [597, 481, 372, 451],
    }


def test_blocks_of_32_are_asked_of_where_tensor_cores_apply_their_scales() -> None:
    recipe = MXFP8BlockScaling()
    assert linear_cost_reason(16, 4096, 4096, TRAINING, recipe, published(TARGETS["h200"])) == ""
    assert "NVIDIA B200" in linear_cost_reason(16, 4096, 4096, TRAINING, recipe, published(TARGETS["b200"]))
    assert border("b200", 4096, 4096, TRAINING, recipe) == 1849


def test_a_calibrated_gpu_says_so() -> None:
    facts = {
        **FOUND_ON_AN_H200,
        "copy_tbps": FOUND_ON_AN_H200["copy_tbps"] / 2,
        "cpu_step_us": 2 * FOUND_ON_AN_H200["cpu_step_us"],
        "quantize_us": [2 * us for us in FOUND_ON_AN_H200["quantize_us"]],
    }
    rates = calibrated(TARGETS["h200"], facts)
    assert (rates.reading, rates.bf16, rates.fp8, rates.launch, rates.cpu) == (0.5, 1, 1, 1, 2)
    assert rates.quantizing == pytest.approx(0.5)
    assert "(calibrated on this GPU)" in linear_cost_reason(1100, 4096, 4096, TRAINING, Float8CurrentScaling(), rates)
    assert linear_cost_reason(1100, 4096, 4096, TRAINING, Float8CurrentScaling(), H200) == ""


def test_fp32_is_asked_too() -> None:
    """In TF32 a product has half bf16's rate, in fp32 a fifteenth; what quantizes it reads twice the bytes."""
    reason = "M = 64, N = 14336, K = 4096: fp32 takes 165 us, FP8 182 us, of which quantizing its weight takes 154 us"
    assert on_cuda(64, learns=False, dtype=torch.float32).reasons()[0].startswith(reason)
    assert on_cuda(128, dtype=torch.float32).records[0].matched
    torch.set_float32_matmul_precision("high")
    try:
        assert "fp32 takes 57 us" in on_cuda(64, learns=False, dtype=torch.float32).reasons()[0]
        assert [on_cuda(rows, dtype=torch.float32).records[0].matched for rows in (256, 1024)] == [False, True]
    finally:
        torch.set_float32_matmul_precision("highest")
    experts = (2048, 4096, 4096, 8, Float8CurrentScaling(), False, H200)
    assert experts_cost_reason(*experts) and not experts_cost_reason(*experts, dtype=torch.float32)


@pytest.mark.parametrize("named", [False, True])
def test_an_authors_fp32_is_kept(named: bool) -> None:
    """transformers' DeepSeek-V3 routes so, and as experts would; x read in fp32 alone, or autocast, asks for nothing."""

    def forward(x, w, bank):
        rows = x.view(-1, 64)
        router = F.linear(rows.type(torch.float32), w.type(torch.float32)), rows.float() @ w.float().t()
        return *router, torch.bmm(x.float(), bank.float()), F.linear(x, w), F.linear(x.float(), w.float() * 2)

    x, w, bank = torch.randn(2, 16, 64).bfloat16(), torch.randn(32, 64).bfloat16(), torch.randn(2, 64, 32).bfloat16()
    bank = nn.Parameter(bank)
    compiled = Matched(forward, **({"rules": [("", FP8)]} if named else {}))
    compiled(x, nn.Parameter(w), bank)
    reason = "its input and its weight are cast up to fp32 for it; add a rule for this module to force FP8"
    assert compiled.reasons() == [*[("" if named else reason)] * 3, "", ""]
    compiled = Matched(lambda x, w: F.linear(x.float(), w.float()))
    with torch.autocast("cpu", torch.bfloat16):
        compiled(x, nn.Parameter(w))
    assert compiled.reasons() == [""]


@pytest.mark.parametrize("name", recipes.names())
def test_a_recipe_has_times_or_is_emulated(name: str) -> None:
    """What has none is taken for emulated, and matched however few rows there are."""
    recipe = recipes.by_name(name)
    assert (linear_times(16, 4096, 4096, ("fprop",), recipe, H200) == ()) == recipe.is_emulated(H200.target)
