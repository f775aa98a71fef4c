"""te.grouped_linear in formats with scales of blocks or rows: for each expert what te.linear of it alone gives, bit for bit."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from helpers.oracles.quantizer_cases import same_bits
from hypothesis import given, settings
from hypothesis import strategies as st

from te_dynamo import Float8BlockQuantizer, MXFP8Quantizer, NVFP4Quantizer, to_tensor_proto
from te_dynamo.dialect.grouped_linear import (
    GroupedLinearConfig,
    GroupedLinearFwdArgs,
    grouped_linear_forward,
    grouped_linear_forward_fake,
    quantize_group_columns,
    quantize_groups,
)
from te_dynamo.dialect.linear import LinearConfig
from te_dynamo.errors import QuantizationError
from te_dynamo.kernels.tiles.groups import padded_reference, padded_rows
from te_dynamo.quantized.quantize import quantize_tensor
from te_dynamo.recipe import Float8BlockScaling, Float8RowwiseScaling, MXFP8BlockScaling, Recipe

RECIPES: list[Recipe] = [
    Float8BlockScaling(),
    Float8BlockScaling(weight_block_dims=1, backward_format="e5m2", power_of_two_scales=False),
    MXFP8BlockScaling(),
    MXFP8BlockScaling(scale_block=128),
    Float8RowwiseScaling(),
]
NAMES = ["blocks", "blocks 1x128", "mxfp8", "mxfp8 128", "rows"]
FIRST, LAST = 128, 160
"""Dimensions of an expert's weight as it is stored."""


def config(recipe: Recipe, transposed: bool = False, x: bool = True, weight: bool = True) -> GroupedLinearConfig:
    return GroupedLinearConfig.from_recipe(
        recipe, weight_transposed=transposed, input_requires_grad=x, weight_requires_grad=weight
    )


def operands(
    sizes=(5, 0, 130),
    behind: int = 0,
    transposed: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    first: int = FIRST,
):
    """x [M, K], weight [G, N, K] or [G, K, N], the ends of the groups; each row and expert of a magnitude of its own."""
    generator = torch.Generator().manual_seed(0)
    rows, k = sum(sizes) + behind, first if transposed else LAST
    x = torch.randn(rows, k, generator=generator) * torch.rand(rows, 1, generator=generator).exp2()
    weight = torch.randn(len(sizes), first, LAST, generator=generator) * (1 + torch.arange(len(sizes)))[:, None, None]
    offs = torch.tensor(sizes).cumsum(0).int()
    return x.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), offs


@pytest.mark.one_fast_case
@pytest.mark.parametrize("recipe", RECIPES, ids=NAMES)
@settings(max_examples=6, deadline=None)
@given(
    st.lists(st.sampled_from([0, 1, 5, 33, 127, 128, 129, 200]), min_size=1, max_size=4).filter(any),
    st.integers(0, 3),
    st.booleans(),
    st.sampled_from([torch.bfloat16, torch.float32]),
)
def test_each_expert_is_a_linear_of_its_own(recipe: Recipe, sizes, behind, transposed, dtype) -> None:
    first = 96 if recipe == MXFP8BlockScaling() else FIRST
    x, weight, offs = operands(sizes, behind, transposed, dtype, first)
    y = torch.ops.te.grouped_linear(x, weight, offs, config(recipe, transposed))[0]
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    y.backward(dy)
    alone = LinearConfig.from_recipe(
        recipe, input_requires_grad=True, weight_requires_grad=True, weight_transposed=transposed
    )
    for expert, (size, end) in enumerate(zip(sizes, offs.tolist(), strict=True)):
        rows = slice(end - size, end)
        if not size:
            assert not weight.grad[expert].any()
            continue
        x_one, weight_one = x.detach()[rows].requires_grad_(), weight.detach()[expert].requires_grad_()
        y_one = torch.ops.te.linear(x_one, weight_one, None, alone)[0]
        y_one.backward(dy[rows])
        assert same_bits(y[rows].detach(), y_one.detach())
        assert same_bits(x.grad[rows], x_one.grad)
        if recipe.name == "float8_rowwise":  # alone, plain PyTorch adds up the zeros behind M too: in another order
            largest = weight_one.grad.abs().max().item()
            bound = (
                {"rtol": 2.0**-7, "atol": 2.0**-7 * largest}
                if dtype == torch.bfloat16
                else {"rtol": 1e-5, "atol": 1e-5 * largest}
            )
            torch.testing.assert_close(weight.grad[expert], weight_one.grad, **bound)
        else:
            assert same_bits(weight.grad[expert], weight_one.grad)
    behind_last = slice(offs[-1], None)
    assert not y[behind_last].any() and not x.grad[behind_last].any()


@pytest.mark.parametrize("recipe", RECIPES, ids=NAMES)
@pytest.mark.parametrize("transposed", [False, True])
def test_saves_what_the_fake_says(recipe: Recipe, transposed: bool) -> None:
    for grads in itertools.product((True, False), repeat=2):
        x, weight, offs = operands(transposed=transposed)
        setting = config(recipe, transposed, *grads)
        _, saved = grouped_linear_forward(GroupedLinearFwdArgs(x, weight, offs, setting))
        _, protos = grouped_linear_forward_fake(to_tensor_proto(x), to_tensor_proto(weight), setting)
        buffers = iter(saved)
        for proto in protos:
            proto.check_layout({slot: next(buffers) for slot in proto.inner_names()})
        assert next(buffers, None) is None and len(saved) == 2 * sum(grads)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.te.grouped_linear.default, (x, weight, offs, setting), test_utils=tests)


@pytest.mark.parametrize("recipe", RECIPES, ids=NAMES)
@pytest.mark.parametrize("transposed", [False, True])
def test_a_kept_weight_gives_the_same_bits(recipe: Recipe, transposed: bool) -> None:
    x, weight, offs = operands(transposed=transposed)
    setting = config(recipe, transposed)
    buffers = quantize_tensor(weight.detach(), setting.weight_quantizer)
    assert setting.stored_shape(buffers, len(offs)) == tuple(weight.shape)
    results = []
    for call in (
        lambda: torch.ops.te.grouped_linear(x, weight, offs, setting)[0],
        lambda: torch.ops.te.grouped_linear_with_workspace(x, weight, offs, setting, buffers)[0],
    ):
        y = call()
        results.append((y.detach(), *torch.autograd.grad(y.square().sum(), (x, weight))))
    assert all(same_bits(a, b) for a, b in zip(*results, strict=True))
    inference = config(recipe, transposed, False, False)
    buffers = quantize_tensor(weight.detach(), inference.weight_quantizer)
    arguments = (x.detach(), None, offs, inference, buffers)
    torch.library.opcheck(
        torch.ops.te.grouped_linear_with_workspace.default, arguments, test_utils=("test_faketensor",)
    )


@pytest.mark.parametrize(
    "quantizer", [Float8BlockQuantizer(), MXFP8Quantizer(), MXFP8Quantizer(scale_block=128)], ids=lambda q: q.describe()
)
def test_columns_are_those_of_the_padded_order(quantizer) -> None:
    x, _, offs = operands((5, 0, 130, 128), behind=4)
    rows, columns = quantizer.with_usage(True, False), quantizer.with_usage(False, True)
    padded = padded_reference(x.detach(), offs)
    assert padded.shape[0] == padded_rows(x.shape[0], 4) == 768
    for expected, start, size in ((0, 0, 5), (128, 5, 130), (384, 135, 128)):
        assert torch.equal(padded[expected : expected + size], x[start : start + size])
    expected_buffers = [*quantize_tensor(x, rows), *quantize_tensor(padded, columns)]
    found = quantize_groups(x.detach(), offs, quantizer)
    assert all(same_bits(a, b) for a, b in zip(found, expected_buffers, strict=True))
    torch.library.opcheck(
        quantize_group_columns, (x.detach(), offs, columns), test_utils=("test_schema", "test_faketensor")
    )


def test_groups_of_another_expert_do_not_matter() -> None:
    """A NaN or an infinity stays in its group, forward and backward."""
    for recipe in RECIPES:
        x, weight, offs = operands((70, 3, 80))
        with torch.no_grad():
            x[71, 5] = torch.nan
        y = torch.ops.te.grouped_linear(x, weight, offs, config(recipe))[0]
        y.backward(torch.ones_like(y))
        assert y[70:73].isnan().any() and y[:70].isfinite().all() and y[73:].isfinite().all()
        assert weight.grad[1].isnan().any() and weight.grad[0].isfinite().all() and weight.grad[2].isfinite().all()


def test_bad_input() -> None:
    good = config(RECIPES[0])
    with pytest.raises(QuantizationError, match=r"128x128\[.*\]: blocks of 128 rows would be two experts'"):
        dataclasses.replace(good, input_quantizer=Float8BlockQuantizer(block_dims=2))
    with pytest.raises(QuantizationError, match="blocks of 128 rows would be two experts'"):
        config(Float8BlockScaling(weight_block_dims=1, grad_block_dims=2))
    with pytest.raises(QuantizationError, match="there is no grouped GEMM for it"):
        dataclasses.replace(good, grad_output_quantizer=NVFP4Quantizer())
    with pytest.raises(QuantizationError, match="expected x, the weight and dy in one format"):
        dataclasses.replace(good, weight_quantizer=MXFP8Quantizer())
    with pytest.raises(QuantizationError, match="expected x, the weight and dy in one format"):
        dataclasses.replace(config(RECIPES[2]), weight_quantizer=MXFP8Quantizer(scale_block=128))
    x, weight, offs = operands()
    for recipe in (recipe for recipe in RECIPES if recipe.weight_quantizer().experts_begin_at() == 128):
        with pytest.raises(
            ValueError, match=r"b \[G N, K\], N a multiple of 128, got \(135, 160\) and \(288, 160\) of 3"
        ):
            torch.ops.te.grouped_linear(x, weight[:, :96].contiguous(), offs, config(recipe))
        with pytest.raises(ValueError, match=r"the end of each group, got torch\.int64"):
            torch.ops.te.grouped_linear(x, weight, offs.long(), config(recipe))
    with pytest.raises(QuantizationError, match="expected columns by rows, in 1x128 blocks or MXFP8"):
        quantize_group_columns(x, offs, Float8BlockQuantizer())
