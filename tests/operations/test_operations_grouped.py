"""GroupedLinear: te.grouped_linear as an operation, its high precision against autograd, its fake, and what it refuses."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.oracles.quantizer_cases import same_bits
from torch.testing import assert_close

import te_dynamo
from te_dynamo import Sequential
from te_dynamo.dialect.grouped_linear import GroupedLinearConfig
from te_dynamo.errors import InputError, InvalidOptionError
from te_dynamo.operations.basic import GroupedLinear, ScaledSwiGLU
from te_dynamo.operations.fuser import grouped
from te_dynamo.operations.program import Program
from te_dynamo.operations.run import Call
from te_dynamo.recipe import Float8BlockScaling, Float8CurrentScaling, MXFP8BlockScaling, NVFP4BlockScaling

G, N, K = 3, 32, 48
FP8 = Float8CurrentScaling()
UNQUANTIZED = [
    None,
    NVFP4BlockScaling(),
    Float8CurrentScaling(backward="high_precision"),
    Float8BlockScaling(weight_block_dims=1, grad_block_dims=2),
]
IDS = ["none", "nvfp4", "high precision backward", "gradients in blocks of rows"]


def module_of(recipe: Any = None, dtype: torch.dtype = torch.bfloat16) -> Sequential:
    torch.manual_seed(0)
    return Sequential(GroupedLinear(G, K, N), recipe=recipe, dtype=dtype)


def inputs_of(
    sizes: tuple[int, ...] = (5, 0, 14), behind: int = 2, dtype: torch.dtype = torch.bfloat16
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(x [M, K], offs, dy [M, N]); not a number behind the last group."""
    generator = torch.Generator().manual_seed(1)
    x, dy = (torch.randn(sum(sizes) + behind, n, generator=generator).to(dtype) for n in (K, N))
    if behind:
        x[-behind:] = dy[-behind:] = float("nan")
    return x.requires_grad_(), torch.tensor(sizes, dtype=torch.int32).cumsum(0, dtype=torch.int32), dy


def by_loop(x: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    starts, ends = [0, *offs.tolist()[:-1]], offs.tolist()
    pieces = [F.linear(x[a:b], w) for a, b, w in zip(starts, ends, weight, strict=True)]
    return torch.cat([*pieces, x.new_zeros(x.shape[0] - ends[-1], weight.shape[1])])


@pytest.mark.parametrize("recipe", UNQUANTIZED, ids=IDS)
@pytest.mark.parametrize("sizes", [(5, 0, 14), (0, 0, 3), (8, 8, 8), (0, 0, 0)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_high_precision_equals_autograd(recipe: Any, sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    """Rows behind the groups are zero in y and dx, and reach no gradient."""
    module, (x, offs, dy) = module_of(recipe, dtype), inputs_of(sizes, dtype=dtype)
    (weight,) = module.parameters()
    y = module(x, offs)
    expected = by_loop(x, weight, offs)
    for run in range(2):  # a second backward is the first
        found = torch.autograd.grad(y, (x, weight), dy, retain_graph=run == 0)
        others = torch.autograd.grad(expected, (x, weight), dy, retain_graph=True)
        for a, b in zip((y, *found), (expected, *others), strict=True):
            assert a.dtype == b.dtype
            assert_close(a, b, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)


@pytest.mark.parametrize("sizes", [(5, 0, 14), (0, 0, 3)], ids=str)
@pytest.mark.parametrize(("needs_x", "needs_weight"), [(True, True), (True, False), (False, True)])
def test_fp8_is_te_grouped_linear_bit_for_bit(sizes: tuple[int, ...], needs_x: bool, needs_weight: bool) -> None:
    module, (x, offs, dy) = module_of(FP8), inputs_of(sizes, behind=0)
    weight = module.get_parameter("0.weight").requires_grad_(needs_weight)
    wanted = [x] * needs_x + [weight] * needs_weight
    config = GroupedLinearConfig.from_recipe(
        FP8, weight_transposed=False, input_requires_grad=needs_x, weight_requires_grad=needs_weight
    )
    x.requires_grad_(needs_x)
    y, expected = module(x, offs), torch.ops.te.grouped_linear(x, weight, offs, config)[0]
    assert same_bits(y.detach(), expected.detach())
    assert not torch.equal(y, by_loop(x, weight, offs)), "it ran in high precision"
    for a, b in zip(*(torch.autograd.grad(out, wanted, dy) for out in (y, expected)), strict=True):
        assert same_bits(a, b)


@pytest.mark.parametrize("recipe", [FP8, *UNQUANTIZED], ids=["fp8", *IDS])
def test_fake_has_the_real_layout(recipe: Any) -> None:
    """Slot for slot, for every combination of gradients."""
    op = GroupedLinear(G, K, N, recipe)
    x, offs, _ = inputs_of()
    weight = torch.randn(G, N, K)  # of another dtype than x
    for training, *flags in itertools.product((True, False), repeat=3):
        groups = grouped([op])
        program = Program(Call.of([op], [*flags, False], training), groups, groups)
        real = program.run(x.detach(), [weight], [offs])
        fake = program.fake(x.detach(), [weight], [offs])
        assert [(t.shape, t.dtype, t.stride()) for t in real] == [(t.shape, t.dtype, t.stride()) for t in fake]
        # In high precision what is saved are inputs; in FP8 data and scale of each operand.
        assert len(real) == 1 + (2 * sum(flags) if recipe is FP8 else 0)


@pytest.mark.parametrize("recipe", [FP8, None], ids=["fp8", "none"])
@pytest.mark.parametrize("backend", ["aot_eager", "te"])
def test_compiled_whole(backend: str, recipe: Any) -> None:
    """Two linears with their own groups: one graph for all numbers of rows, whatever the sizes of the groups."""
    torch.manual_seed(0)
    ops = GroupedLinear(G, K, 2 * N), ScaledSwiGLU(), GroupedLinear(G, N, K)
    module = Sequential(*ops, recipe=recipe, dtype=torch.bfloat16)
    torch._dynamo.reset()
    options = {"codegen": "eager"} if backend == "te" else None
    compiled = torch.compile(module, backend=backend, fullgraph=True, options=options)
    for sizes in ((5, 0, 14), (9, 10, 0), (0, 0, 8)):
        x, offs, _ = inputs_of(sizes, behind=0)
        scales = torch.rand(len(x), requires_grad=True)
        for tensor in (x, scales):
            torch._dynamo.mark_dynamic(tensor, 0)
        results = []
        for run in (module, compiled):
            y = run(x, offs, scales, offs)
            results.append((y, *torch.autograd.grad(y.square().sum(), (x, scales, *module.parameters()))))
        for a, b in zip(*results, strict=True):
            assert torch.equal(a, b)


def test_the_report_lists_it() -> None:
    """With its experts where it is quantized, with the reason where not."""
    x, offs, _ = inputs_of()
    for recipe, reason in (
        (FP8, ""),
        (NVFP4BlockScaling(), "nvfp4: there is no grouped GEMM"),
        (None, "its Sequential has no recipe"),
    ):
        told = te_dynamo.explain(module_of(recipe), x, offs, options={"codegen": "eager"}).to_dict()
        (row,) = told["linears"]
        assert (row["matched"], row["groups"], row["shape"][1:]) == (not reason, G, (str(N), str(K)))
        assert reason in row["reason"] and row["recipe"] == ("" if reason else "float8_current_scaling")


@pytest.mark.parametrize("recipe", [Float8BlockScaling(), MXFP8BlockScaling()], ids=["blocks", "mxfp8"])
def test_scales_of_blocks_are_te_grouped_linear(recipe: Any) -> None:
    torch.manual_seed(0)
    module = Sequential(GroupedLinear(G, 64, 128), recipe=recipe, dtype=torch.bfloat16)
    (weight,), x = module.parameters(), torch.randn(21, 64).bfloat16().requires_grad_()
    offs = torch.tensor([5, 5, 19], dtype=torch.int32)
    config = GroupedLinearConfig.from_recipe(
        recipe, weight_transposed=False, input_requires_grad=True, weight_requires_grad=True
    )
    results = []
    for y in (module(x, offs), torch.ops.te.grouped_linear(x, weight, offs, config)[0]):
        results.append((y.detach(), *torch.autograd.grad(y.square().sum(), (x, weight))))
    assert all(same_bits(a, b) for a, b in zip(*results, strict=True))
    with pytest.raises(InvalidOptionError, match="out_features to be a multiple of 128"):
        Sequential(GroupedLinear(G, 64, 64), recipe=Float8BlockScaling())(x, offs)


def test_each_expert_starts_like_a_linear() -> None:
    weight = Sequential(GroupedLinear(4, 64, 256)).get_parameter("0.weight")
    assert weight.shape == (4, 256, 64)
    assert 0.12 < weight.abs().max() <= 1 / 8


def test_bad_arguments() -> None:
    x, offs, _ = inputs_of()
    module = module_of(FP8)
    for wrong, got in ((offs.long(), r"torch.int64 \[3\]"), (offs[:2], r"torch.int32 \[2\]")):
        with pytest.raises(InputError, match=rf"GroupedLinear\(3, 48, 32\): expected .* int32 \[3\].* got {got}"):
            module(x, wrong)
    with pytest.raises(InputError, match=r"GroupedLinear\(3, 48, 32\): expected x \[M, 48\], got \[2, 2, 48\]"):
        module(torch.zeros(2, 2, K), offs)
    with pytest.raises(InputError, match=r"Sequential: expected 1 extra inputs \(GroupedLinear\), got 0"):
        module(x)
    with pytest.raises(InvalidOptionError, match=r"GroupedLinear\(3, 40, 32\): FP8 GEMMs need multiples of 16"):
        Sequential(GroupedLinear(G, 40, N), recipe=FP8)
    with pytest.raises(
        InputError, match=r"GroupedLinear\(3, 12, 32\): .* 16 bytes; .* multiples of 8 for torch.bfloat16"
    ):
        Sequential(GroupedLinear(G, 12, N))(x[:, :12], offs)
