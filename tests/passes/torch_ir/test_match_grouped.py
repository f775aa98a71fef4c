"""Stage 1 on a mixture's experts: which products become te.grouped_linear, what is left and why, and that the rewritten
graph computes the same."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from helpers.graphs.matching import FP8, Matched
from torch import nn

import te_dynamo
from te_dynamo.kernels.runtime.target import TARGETS
from te_dynamo.passes.torch_ir.match.cost import experts_cost_reason
from te_dynamo.rates import published
from te_dynamo.recipe import (
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowwiseScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
)
from te_dynamo.testing import fake_cuda

G, N, K = 4, 64, 32
BF16 = torch.bfloat16
H200 = published(TARGETS["h200"])


def ends(*sizes: int) -> torch.Tensor:
    return torch.tensor(sizes).cumsum(0).int()


def tokens(*shape: int, grad: bool = True) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(*shape, generator=generator).to(BF16).requires_grad_(grad)


class Experts(nn.Module):
    """forward: any function of the module, the tokens and the groups' ends."""

    def __init__(self, forward) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.nk = nn.Parameter(torch.randn(G, N, K, generator=generator).to(BF16))
        self.kn = nn.Parameter(torch.randn(G, K, N, generator=generator).to(BF16))
        self.experts = nn.ModuleList(nn.Linear(K, N, bias=False, dtype=BF16) for _ in range(G))
        self.wide = nn.ModuleList(nn.Linear(K, n, bias=False, dtype=BF16) for n in (32, 64, 64, 64))
        self.bias = nn.Parameter(torch.randn(G, 1, N, generator=generator).to(BF16))
        self.run = forward

    def forward(self, *args):
        return self.run(self, *args)


FORMS = {
    "grouped_mm [G, K, N]": lambda m, x, offs: F.grouped_mm(x, m.kn, offs=offs),
    "grouped_mm [G, N, K]": lambda m, x, offs: F.grouped_mm(x, m.nk.transpose(-2, -1), offs=offs),
    "_grouped_mm": lambda m, x, offs: torch._grouped_mm(x, m.nk.bfloat16().transpose(1, 2), offs),
    "mT": lambda m, x, offs: F.grouped_mm(x, m.nk.mT, offs=offs),
    "strides": lambda m, x, offs: F.grouped_mm(x, torch.permute(m.nk, (0, 2, 1)), offs=offs),
    "bmm": lambda m, x, offs: torch.bmm(x.view(G, -1, x.shape[-1]), m.kn).flatten(0, 1),
    "matmul": lambda m, x, offs: (x.view(G, -1, x.shape[-1]) @ m.nk.mT).flatten(0, 1),
    "einsum": lambda m, x, offs: torch.einsum("ecd,edf->ecf", x.view(G, -1, x.shape[-1]), m.kn).flatten(0, 1),
    "einsum of groups": lambda m, x, offs: torch.einsum("egcd,efd->egcf", x.view(G, -1, 1, x.shape[-1]), m.nk).flatten(
        0, 2
    ),
    "einsum of blocks": lambda m, x, offs: (
        torch.einsum("bkp,kqp->bkq", x.view(G, -1, x.shape[-1]).transpose(0, 1), m.nk).transpose(0, 1).flatten(0, 1)
    ),
    "one more dimension": lambda m, x, offs: (x.view(G, -1, 1, x.shape[-1]) @ m.kn[:, None]).flatten(0, 2),
    "weight on the left": lambda m, x, offs: (m.nk @ x.view(G, -1, x.shape[-1]).mT).mT.flatten(0, 1),
    "baddbmm": lambda m, x, offs: torch.baddbmm(m.bias, x.view(G, -1, x.shape[-1]), m.kn).flatten(0, 1),
    "grouped_mm 3-D": lambda m, x, offs: F.grouped_mm(x.view(G, -1, x.shape[-1]), m.kn).flatten(0, 1),
}


@pytest.mark.parametrize("form", FORMS)
def test_each_form_is_one_grouped_linear_of_the_same_value(form: str) -> None:
    model, x, offs = Experts(FORMS[form]), tokens(12, K), ends(2, 0, 7, 3)
    expected = model(x, offs)
    for run, tolerance in (
        ("aot", 5e-3 if form == "baddbmm" else 1e-6),
        ("te", 0.08),
    ):  # the bias is added to what is rounded
        compiled = Matched(model, run=run)
        y = compiled(x, offs)
        assert (y - expected).norm() <= tolerance * expected.norm() and y.shape == expected.shape
        assert compiled.text().count("te.grouped_linear(") == 1
        assert ("transpose" in compiled.text()) == (form in ("strides", "einsum of blocks")), (
            "a weight is read as it is stored"
        )
        (record,) = compiled.records
        assert (record.kind, record.matched, record.recipe) == ("linear", True, FP8)
        assert (record.shape, record.groups, record.flops) == (("12", "64", "32"), G, 2 * 12 * N * K)
        parameters = [p for p in model.parameters() if p is model.nk or p is model.kn]
        ones = torch.ones_like(y)
        gradients = torch.autograd.grad(y, [x, *parameters], ones, allow_unused=True)
        references = torch.autograd.grad(model(x, offs), [x, *parameters], ones, allow_unused=True)
        for actual, reference in zip(gradients, references, strict=True):
            assert (actual is None) == (reference is None)
            if actual is not None:
                assert (actual - reference).norm() <= tolerance * reference.norm()


def under_autocast(run, *args):
    with torch.autocast("cpu", BF16):
        return run(*args)


def in_a_region(run):
    return lambda *args: under_autocast(run, *args)


BY_BMM = list(FORMS)[list(FORMS).index("bmm") : -1]
"""Autocast does not cast for torch's grouped product."""


@pytest.mark.one_fast_case
@pytest.mark.parametrize(
    ("form", "around"), [*((form, "the call") for form in BY_BMM), ("bmm", "a region"), ("einsum", "a region")]
)
def test_under_autocast_it_runs_in_the_dtype_of_autocast(form: str, around: str) -> None:
    forward = FORMS[form] if around == "the call" else in_a_region(FORMS[form])
    model, x, offs = Experts(forward).float(), tokens(12, K, grad=False).float().requires_grad_(), ends(3, 3, 3, 3)
    expected = under_autocast(model, x, offs)
    parameters = [p for p in model.parameters() if p is model.nk or p is model.kn]
    ones = torch.ones_like(expected)
    references = torch.autograd.grad(expected, [x, *parameters], ones, allow_unused=True)
    for run, tolerance in (("aot", 5e-3), ("te", 0.08)):
        compiled = Matched(model, run=run)
        y = under_autocast(compiled, x, offs) if around == "the call" else compiled(x, offs)
        assert y.dtype == expected.dtype == BF16 and (y - expected).norm() <= tolerance * expected.norm()
        assert compiled.text().count("te.grouped_linear(") == 1
        (record,) = compiled.records
        assert (record.matched, record.dtype, record.groups) == (True, "bf16", G)
        gradients = torch.autograd.grad(y, [x, *parameters], ones, allow_unused=True)
        for actual, reference in zip(gradients, references, strict=True):
            assert (actual is None) == (reference is None)
            if actual is not None:
                assert actual.dtype == torch.float32 and (actual - reference).norm() <= tolerance * reference.norm()


def test_snapshot() -> None:
    """The weight as it is stored: no transposition stays."""

    def forward(m, x, offs):
        h = F.grouped_mm(x, m.nk.transpose(-2, -1), offs=offs)
        return F.grouped_mm(F.silu(h), m.nk, offs=offs)

    model = Matched(Experts(forward), run="te")
    model(tokens(12, K), ends(2, 0, 7, 3))
    assert_expected_inline(
        model.text(),
        """\
grouped_linear_default = te.grouped_linear(args_0, nk, args_1, dx=True dw=True)
getitem: bfloat16[12, 64] = getitem(grouped_linear_default, 0)
silu_default: bfloat16[12, 64] = te.silu(getitem)
grouped_linear_default_1 = te.grouped_linear(silu_default, nk, args_1, dx=True dw=True)
getitem_1: bfloat16[12, 32] = getitem(grouped_linear_default_1, 0)
return (getitem_1)""",
    )


LEFT = {
    "2-D by 2-D": (
        lambda m, x, offs: F.grouped_mm(x.t(), x, offs=offs),
        "a grouped GEMM of 2-D by 2-D operands; te.grouped_linear takes tokens by experts, 2-D by 3-D",
    ),
    "3-D by 2-D": (
        lambda m, x, offs: F.grouped_mm(m.nk, x.t(), offs=offs),
        "a grouped GEMM of 3-D by 2-D operands; te.grouped_linear takes tokens by experts, 2-D by 3-D",
    ),
    "narrow": (
        lambda m, x, offs: F.grouped_mm(x, m.kn[:, :, :24].contiguous(), offs=offs),
        "N = 24, K = 32: FP8 GEMMs need N and K to be multiples of 16; padding N to 32 would add 33%, more than 1/16",
    ),
    "no rows": (lambda m, x, offs: torch.bmm(x[:0].view(G, 0, K), m.kn), "its input has no rows"),
    "fp64": (
        lambda m, x, offs: torch.bmm(x.view(G, -1, K).to(torch.float64), m.kn.to(torch.float64)),
        "its input is fp64; te.linear takes bf16, fp16 and fp32",
    ),
}


@pytest.mark.parametrize("form", LEFT)
def test_left_with_the_reason(form: str) -> None:
    forward, reason = LEFT[form]
    compiled, x, offs = Matched(Experts(forward)), tokens(12, K), ends(2, 0, 7, 3)
    torch.testing.assert_close(compiled(x, offs), forward(compiled.module, x, offs))
    assert compiled.reasons() == [reason] and "te." not in compiled.text()


class Unaligned(Experts):
    """Of 200 columns and 136 features."""

    def __init__(self, forward, n: int = 200, k: int = 136) -> None:
        super().__init__(forward)
        generator = torch.Generator().manual_seed(2)
        self.nk = nn.Parameter(torch.randn(G, n, k, generator=generator).to(BF16) / 8)
        self.kn = nn.Parameter(torch.randn(G, k, n, generator=generator).to(BF16) / 8)
        self.bias = nn.Parameter(torch.randn(G, 1, n, generator=generator).to(BF16))
        self.experts = nn.ModuleList(nn.Linear(k, n, bias=False, dtype=BF16) for _ in range(G))


PADDED = {
    **{form: forward for form, forward in FORMS.items() if form != "grouped_mm 3-D"},
    "views": lambda m, x, offs: torch.bmm(x.view(G, -1, 136), m.kn).view(12, 200) * 2,
    "autocast": in_a_region(lambda m, x, offs: torch.bmm(x.float().view(G, -1, 136), m.nk.float().mT)),
    "loop": lambda m, x, offs: torch.cat([e(piece) for e, piece in zip(m.experts, x.chunk(4), strict=True)]),
}


@pytest.mark.one_fast_case
@pytest.mark.parametrize("form", PADDED)
def test_experts_are_padded_as_linears_are(form: str) -> None:
    model, x, offs = Unaligned(PADDED[form]), tokens(12, 136), ends(3, 3, 3, 3)
    expected = model(x, offs)
    ones, parameters = torch.ones_like(expected), list(model.parameters())
    references = torch.autograd.grad(expected, [x, *parameters], ones, allow_unused=True)
    for run, tolerance in (("aot", 1e-2), ("te", 0.1)):
        compiled = Matched(model, run=run)
        y = compiled(x, offs)
        assert y.shape == expected.shape and (y - expected).norm() <= tolerance * expected.norm()
        assert compiled.text().count("te.grouped_linear(") == 1 and all(record.matched for record in compiled.records)
        gradients = torch.autograd.grad(y, [x, *parameters], ones, allow_unused=True)
        for actual, reference in zip(gradients, references, strict=True):
            assert (actual is None) == (reference is None)
            if actual is not None:
                assert (actual - reference).norm() <= tolerance * reference.norm()


@pytest.mark.one_fast_case
@pytest.mark.parametrize("form", ["grouped_mm [G, K, N]", "mT"])
def test_blocks_of_experts_are_padded_to_blocks(form: str) -> None:
    model, x, offs = Unaligned(FORMS[form], 2040, 2040), tokens(12, 2040), ends(2, 0, 7, 3)
    compiled = Matched(model, recipe=Float8BlockScaling(), run="te")
    y, expected = compiled(x, offs), model(x, offs)
    assert compiled.records[0].matched and (y - expected).norm() <= 0.1 * expected.norm()


class WideExperts(nn.Module):
    """Weights of both layouts, whose second dimension is that of blocks."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.up = nn.Parameter(torch.randn(G, 128, 32, generator=generator).to(BF16))
        self.down = nn.Parameter(torch.randn(G, 128, 32, generator=generator).to(BF16))

    def forward(self, x: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        return F.grouped_mm(F.silu(F.grouped_mm(x, self.up.transpose(-2, -1), offs=offs)), self.down, offs=offs)


@pytest.mark.parametrize(
    "recipe",
    [Float8BlockScaling(), MXFP8BlockScaling(), MXFP8BlockScaling(scale_block=128), Float8RowwiseScaling()],
    ids=Recipe.describe,
)
def test_recipes_with_scales_of_blocks_or_rows(recipe: Recipe) -> None:
    model, x, offs = WideExperts(), tokens(12, K), ends(2, 0, 7, 3)
    compiled = Matched(model, recipe=recipe, run="te")
    results = []
    for run in (model, compiled):
        y = run(x, offs)
        results.append((y, *torch.autograd.grad(y.square().sum(), (x, *model.parameters()))))
    assert [record.recipe for record in compiled.records if record.kind == "linear"] == [recipe.describe()] * 2
    for expected, found in zip(*results, strict=True):
        assert 0 < (found - expected).norm() <= 0.1 * expected.norm()


@pytest.mark.parametrize(
    ("recipe", "reason"),
    [
        (NVFP4BlockScaling(), "a grouped GEMM of a mixture's experts; nvfp4: there is no grouped GEMM for it"),
        (
            Float8BlockScaling(input_block_dims=2, weight_block_dims=1),
            "a grouped GEMM of a mixture's experts; float8_block_scaling(input_block_dims=2, weight_block_dims=1): blocks of 128 "
            "rows would be two experts'",
        ),
        (
            MXFP8BlockScaling(scale_block=128),
            "K = 32: MXFP8 GEMMs of experts need K to be a multiple of 128, where experts share no block of scales",
        ),
        (
            Float8CurrentScaling(backward="high_precision"),
            "a grouped GEMM of a mixture's experts; float8_current_scaling(backward='high_precision'): te.grouped_linear has no dgrad and wgrad in high precision",
        ),
        (
            Float8RowwiseScaling(wgrad="bf16"),
            "a grouped GEMM of a mixture's experts; float8_rowwise(wgrad='bf16'): te.grouped_linear has no wgrad in high precision",
        ),
        (None, "recipe is None"),
    ],
    ids=str,
)
def test_recipes_without_a_grouped_gemm(recipe, reason) -> None:
    compiled = Matched(Experts(FORMS["grouped_mm [G, K, N]"]), recipe=recipe)
    compiled(tokens(12, K), ends(2, 0, 7, 3))
    assert compiled.reasons() == [reason] and "te." not in compiled.text()


def test_products_of_activations_are_none_of_ours() -> None:
    compiled = Matched(lambda x: torch.bmm(x, x.transpose(1, 2)) @ x)
    compiled(tokens(2, 16, K, grad=False))
    assert compiled.records == []


def test_dynamic_tokens_match_and_stay_dynamic() -> None:
    for form in ("grouped_mm [G, K, N]", "bmm", "einsum of blocks", "one more dimension"):
        model = Experts(FORMS[form])
        compiled = Matched(model, run="te", dynamic=True)
        for each in (3, 5):
            x, offs = tokens(G * each, K), ends(*[each] * G)
            y, expected = compiled(x, offs), model(x, offs)
            assert (y - expected).norm() < 0.08 * expected.norm()
        assert len(compiled.graphs) == 1 and compiled.records[0].matched


# ---- loops over experts


def loop(split, cat=torch.cat, modules="experts"):
    def forward(m, x, *_):
        return cat([expert(piece) for expert, piece in zip(getattr(m, modules), split(x), strict=True)])

    return forward


@pytest.mark.parametrize(
    "split",
    [
        lambda x: x.split([2, 0, 7, 3]),
        lambda x: torch.split(x, 3),
        lambda x: x.chunk(4, dim=0),
        lambda x: torch.tensor_split(x, 4),
    ],
)
def test_a_loop_over_all_pieces_is_one_grouped_linear(split) -> None:
    model, x = Experts(loop(split)), tokens(12, K)
    expected = model(x)
    compiled = Matched(model, run="te", rules=[("never", None)])
    y = compiled(x)
    assert (y - expected).norm() < 0.08 * expected.norm()
    assert compiled.text().count("te.grouped_linear(") == 1 and "te.linear" not in compiled.text()
    assert [(r.module, r.matched, r.groups) for r in compiled.records] == [(f"experts.{i}", True, G) for i in range(G)]
    assert sum(r.flops for r in compiled.records) == 2 * 12 * N * K
    weights = [expert.weight for expert in model.experts]
    gradients = torch.autograd.grad(y.sum(), [x, *weights])
    for actual, reference in zip(gradients, torch.autograd.grad(model(x).sum(), [x, *weights]), strict=True):
        assert (actual - reference).norm() <= 0.08 * reference.norm()


def test_a_loop_under_autocast_is_one_grouped_linear() -> None:
    model, x = Experts(loop(lambda x: x.chunk(4))).float(), tokens(12, K).float()
    compiled = Matched(model, run="te")
    y, expected = under_autocast(compiled, x), under_autocast(model, x)
    assert y.dtype == expected.dtype == BF16 and (y - expected).norm() < 0.08 * expected.norm()
    assert compiled.text().count("te.grouped_linear(") == 1 and "te.linear" not in compiled.text()
    with te_dynamo.capture() as graphs:
        under_autocast(torch.compile(model, backend="te", options={"codegen": "eager", "weight_cache": "step"}), x)
    assert len(graphs.reports[0].workspaces) == 1, "its weights are kept as those of linears are"


def in_other_order(m, x):
    a, b, c, d = (expert(piece) for expert, piece in zip(m.experts, x.chunk(4), strict=True))
    return torch.cat([b, a, c, d])


def two_read_one_piece(m, x):
    first, second, *_ = x.chunk(4)
    return torch.cat([m.experts[0](first), m.experts[1](first), m.experts[2](second)])


def some_pieces(m, x):
    return torch.cat([expert(piece) for expert, piece in zip(m.experts, x.chunk(4)[:3], strict=False)])


def also_read_elsewhere(m, x):
    parts = [expert(piece) for expert, piece in zip(m.experts, x.chunk(4), strict=True)]
    return torch.cat(parts), parts[0].sum()


def by_columns(m, x):
    return torch.cat([expert(piece) for expert, piece in zip(m.experts, x.chunk(4), strict=True)], dim=1)


def written_in_between(m, x):
    parts = []
    x = x * 1
    for expert, piece in zip(m.experts, x.chunk(4), strict=True):
        parts.append(expert(piece))
        x.mul_(2)
    return torch.cat(parts)


@pytest.mark.parametrize(
    "forward", [in_other_order, two_read_one_piece, some_pieces, also_read_elsewhere, by_columns, written_in_between]
)
def test_in_other_loops_each_linear_is_its_own(forward) -> None:
    model = Experts(forward)
    compiled, x = Matched(model), tokens(12, K, grad=False)
    torch.testing.assert_close(compiled(x), forward(model, x))
    assert "grouped_linear" not in compiled.text()
    assert compiled.text().count("te.linear(") == len(compiled.records) and all(r.matched for r in compiled.records)


def test_a_loop_over_weights_of_other_sizes_or_rules_is_left_to_linears() -> None:
    def widths(m, x):
        return torch.cat([e(piece).sum(1) for e, piece in zip(m.wide, x.chunk(4), strict=True)])

    for model, options in (
        (Experts(widths), {}),
        (Experts(loop(lambda x: x.chunk(4))), {"rules": [("experts.2", None)]}),
    ):
        compiled = Matched(model, **options)
        compiled(tokens(12, K))
        assert "grouped_linear" not in compiled.text()
        assert compiled.text().count("te.linear(") == 4 - len(options)


# ---- explain


def test_explain_says_how_many_groups() -> None:
    model, x, offs = Experts(FORMS["grouped_mm [G, K, N]"]), tokens(12, K), ends(2, 0, 7, 3)
    explanation = te_dynamo.explain(model, x, offs, options={"codegen": "eager"})
    assert explanation.coverage == 1.0 and "12 x 64 x 32 in 4 groups" in str(explanation)
    assert explanation.to_dict()["linears"][0]["groups"] == 4


# ---- experts that are too small

SIZES = {  # tokens of all experts, width, inner width, experts, and whether FP8 repays its quantization
    "Mixtral 8x7B": (16384, 4096, 14336, 8, True),
    "Qwen3 30B-A3B": (65536, 2048, 768, 128, False),
    "few tokens": (64, 4096, 14336, 8, False),
}


def on_cuda(size: str, dtype: torch.dtype = BF16, **options) -> Matched:
    """Both projections of experts of that size, on fake CUDA tensors."""
    count, width, inner, groups, _ = SIZES[size]
    compiled = Matched(
        lambda x, up, down, offs: F.grouped_mm(F.grouped_mm(x, up, offs=offs), down, offs=offs), **options
    )
    with fake_cuda():
        shapes = (count, width), (groups, width, inner), (groups, inner, width)
        x, up, down = (torch.empty(shape, dtype=dtype, device="cuda", requires_grad=True) for shape in shapes)
        compiled(x, up, down, torch.empty(groups, dtype=torch.int32, device="cuda"))
    return compiled


@pytest.mark.parametrize("size", SIZES)
def test_experts_that_do_not_repay_their_quantization_are_left(size: str) -> None:
    compiled, worth = on_cuda(size), SIZES[size][-1]
    assert [record.matched for record in compiled.records] == [worth, worth]
    assert ("te.grouped_linear" in compiled.text()) == worth
    if size == "Qwen3 30B-A3B":
        assert compiled.reasons()[0] == (
            "512 tokens for each of 128 experts are too few: quantizing takes 551 us, FP8 GEMMs save 252 us (estimated for an "
            "NVIDIA H200); add a rule for this module to force FP8"
        )


@pytest.mark.parametrize(("rule", "matched"), [(("", FP8), True), (("nobody", FP8), False)])
def test_a_rule_that_names_them_has_them_in_fp8(rule, matched: bool) -> None:
    compiled = on_cuda("few tokens", rules=[rule])
    assert [record.matched for record in compiled.records] == [matched] * 2


def test_experts_in_blocks_gain_where_the_gpu_multiplies_them_fast() -> None:
    """Large enough experts: in blocks everywhere; in MXFP8 with block scales; in MXFP8 that is emulated for its numbers."""
    sizes = (2**18, 4096, 4096, 8)
    b200 = published(TARGETS["b200"])
    for recipe, rates, left in (
        (Float8BlockScaling(), H200, False),
        (MXFP8BlockScaling(scale_block=128), H200, True),
        (MXFP8BlockScaling(scale_block=128), b200, False),
        (MXFP8BlockScaling(), b200, False),
        (MXFP8BlockScaling(), H200, False),
    ):
        for training in (False, True):
            assert bool(experts_cost_reason(*sizes, recipe, training, rates)) == left, (recipe, rates, training)


def test_more_tokens_repay_what_fewer_do() -> None:
    """Cost grows with the experts, gain with the tokens: between none and enough of them lies one border."""
    borders = []
    for fast, training in ((False, False), (True, False), (False, True)):
        recipe = Float8CurrentScaling(fprop_fast_accum=fast)
        worth = [
            experts_cost_reason(tokens_, 4096, 4096, 8, recipe, training, H200) == ""
            for tokens_ in range(1024, 65536, 1024)
        ]
        assert worth == sorted(worth) and not worth[0] and worth[-1]
        borders.append(sum(worth))
    assert borders[0] < borders[1], "fast sums save more, and fewer tokens repay what quantizing takes"


def test_what_padding_copies_is_counted() -> None:
    given = (8192, 4096, 4096, 8, Float8CurrentScaling(), True, H200)
    assert experts_cost_reason(*given) == ""
    assert "are too few: padding and quantizing take " in experts_cost_reason(*given, copied=8 * 4096 * 4096)
