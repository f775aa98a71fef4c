"""`quantize_weight` and te.linear on a given workspace: hits, misses, aliases, gradients."""

from __future__ import annotations

import dataclasses
import gc
import weakref

import pytest
import torch
from helpers.models.recipe_cases import RECIPES

from te_dynamo.dialect.linear import LinearBwdArgs, LinearConfig, LinearFwdArgs, linear_forward, saved_aliases
from te_dynamo.errors import QuantizationError, UnsupportedError
from te_dynamo.quantized.quantizers import Float8BlockQuantizer, Float8CurrentScalingQuantizer, NVFP4Quantizer
from te_dynamo.recipe import Float8CurrentScaling
from te_dynamo.weights.quantize_weight import quantize_weight

ROWS = Float8CurrentScalingQuantizer(columnwise=False)
BOTH = Float8CurrentScalingQuantizer()


def weight(seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    torch.manual_seed(seed)
    return torch.randn(48, 32).to(dtype)


def same(one, other) -> bool:
    pairs = zip(one.buffers(), other.buffers(), strict=True)
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)


def test_a_miss_that_may_be_kept_is_both_results() -> None:
    quantized, kept = quantize_weight(weight(), BOTH, cache=True)
    assert quantized is kept
    assert quantize_weight(weight(), BOTH)[1] is None


def test_a_hit_is_the_workspace_and_reads_no_value() -> None:
    workspace, _ = quantize_weight(weight(0), BOTH)
    before = [b.clone() for b in workspace.buffers()]
    quantized, kept = quantize_weight(weight(1), BOTH, workspace, cache=True)
    assert quantized is workspace and kept is None
    assert all(
        torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(before, workspace.buffers(), strict=True)
    )


def test_an_update_writes_the_workspace_in_place() -> None:
    workspace, _ = quantize_weight(weight(0), BOTH)
    places = [b.data_ptr() for b in workspace.buffers()]
    quantized, kept = quantize_weight(weight(1), ROWS, workspace, update=True, cache=True)
    assert quantized is workspace and kept is None and [b.data_ptr() for b in workspace.buffers()] == places
    assert same(workspace, quantize_weight(weight(1), BOTH)[0]), "both usages, though the call asked for rows alone"


@pytest.mark.parametrize(
    ("tensor", "quantizer"),
    [
        (weight(), BOTH),  # made for inference, now training: the columns are missing
        (weight(), Float8CurrentScalingQuantizer(columnwise=False, power_of_two_scale=True)),
        (weight(), Float8BlockQuantizer(columnwise=False)),
        (weight(dtype=torch.float32), ROWS),
        (weight()[:32].clone(), ROWS),
    ],
)
def test_a_workspace_of_something_else_is_a_miss(tensor, quantizer) -> None:
    workspace, _ = quantize_weight(weight(), ROWS)
    quantized, kept = quantize_weight(tensor, quantizer, workspace, cache=True)
    assert quantized is kept is not workspace
    assert same(quantized, quantize_weight(tensor, quantizer)[0])


def test_a_weight_is_not_rounded_at_random() -> None:
    with pytest.raises(QuantizationError, match="stochastic_rounding off"):
        quantize_weight(weight(), NVFP4Quantizer(stochastic_rounding=True))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("bias", [True, False])
def test_a_linear_on_a_workspace_has_the_linears_bits(recipe: str, bias: bool) -> None:
    torch.manual_seed(0)
    config = LinearConfig.from_recipe(RECIPES[recipe], input_requires_grad=True, weight_requires_grad=True)
    x, w, b = torch.randn(2, 7, 64), torch.randn(96, 64), torch.randn(96)
    results = []
    for with_workspace in (False, True):
        leaves = [t.clone().requires_grad_() for t in (x, w, b)]
        arguments = (leaves[0], leaves[1], leaves[2] if bias else None, config)
        if with_workspace:
            buffers = quantize_weight(w, config.weight_quantizer)[0].buffers()
            y = torch.ops.te.linear_with_workspace(*arguments, buffers)[0]
        else:
            y = torch.ops.te.linear(*arguments)[0]
        torch.manual_seed(1)  # of stochastic rounding
        y.backward(torch.ones_like(y))
        results.append([y.detach(), *(leaf.grad for leaf in leaves[: 2 + bias])])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def arguments(**grads: bool):
    config = LinearConfig.from_recipe(
        Float8CurrentScaling(), **{f"{n}_requires_grad": grads.get(n, True) for n in ("input", "weight")}
    )
    torch.manual_seed(0)
    x, w = (torch.randn(n, 32, dtype=torch.bfloat16) for n in (6, 48))
    x.requires_grad_(config.input_requires_grad), w.requires_grad_(config.weight_requires_grad)
    return x, w, None, config, quantize_weight(w, config.weight_quantizer)[0].buffers()


def test_what_is_an_input_is_saved_and_is_no_result() -> None:
    x, w, _, config, buffers = arguments()
    forward = LinearFwdArgs(x, w, None, config, tuple(buffers))
    _, saved = linear_forward(forward)
    assert len(saved) == 2, "of x: columnwise data and scale"
    transpose, scale = saved_aliases(forward)
    assert transpose is buffers[1] and scale is buffers[2]
    results = torch.ops.te.linear_with_workspace(x, w, None, config, buffers)
    assert len(results) == 1 + 2
    kept = results[0].grad_fn.saved_tensors
    assert {t.data_ptr() for t in buffers[1:]} <= {t.data_ptr() for t in kept}, "references, not copies"


@pytest.mark.parametrize("grads", [{}, {"weight": False}, {"input": False}, {"input": False, "weight": False}])
def test_real_and_fake_agree_on_what_there_is(grads) -> None:
    torch.library.opcheck(
        torch.ops.te.linear_with_workspace.default,
        arguments(**grads),
        test_utils=("test_autograd_registration", "test_faketensor"),
    )


def test_the_weight_may_be_gone() -> None:
    x, w, _, config, buffers = arguments(weight=False)
    expected = torch.ops.te.linear(x, w, None, config)[0]
    y = torch.ops.te.linear_with_workspace(x, None, None, config, buffers)[0]
    torch.testing.assert_close(y, expected, rtol=0, atol=0)
    given = torch.randn_like(y)
    gradients = (torch.autograd.grad(out, x, given)[0] for out in (y, expected))
    torch.testing.assert_close(*gradients, rtol=0, atol=0)


@pytest.mark.one_fast_case
@pytest.mark.parametrize("with_workspace", [False, True])
def test_backward_keeps_nothing_and_still_runs_twice(with_workspace: bool) -> None:
    x, w, _, config, buffers = arguments()

    def run() -> torch.Tensor:
        if with_workspace:
            return torch.ops.te.linear_with_workspace(x, w, None, config, buffers)[0]
        return torch.ops.te.linear(x, w, None, config)[0]

    y = run()
    loss = y.sum()
    first = torch.autograd.grad(loss, (x, w), retain_graph=True)
    second = torch.autograd.grad(loss, (x, w))
    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    context = y.grad_fn
    held = [v for v in vars(context).values() if isinstance(v, LinearBwdArgs)]
    tensors = [v for args in held for f in dataclasses.fields(args) for v in [getattr(args, f.name)]]
    assert held and not any(isinstance(v, torch.Tensor) or (isinstance(v, tuple) and v) for v in tensors)
    with pytest.raises(RuntimeError, match=r"second time|already been freed"):
        torch.autograd.grad(loss, (x, w))
    saved = run()
    watched = weakref.ref(saved.grad_fn)
    saved.sum().backward()
    del saved
    gc.collect()
    assert watched() is None


def test_double_backward_says_so() -> None:
    x, w, _, config, buffers = arguments()
    y = torch.ops.te.linear_with_workspace(x, w, None, config, buffers)[0]
    (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(UnsupportedError, match="double backward"):
        dx.sum().backward()


def test_a_workspace_written_before_backward_is_an_error() -> None:
    x, w, _, config, buffers = arguments()
    y = torch.ops.te.linear_with_workspace(x, w, None, config, buffers)[0]
    buffers[1].zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("args_class", [LinearFwdArgs, LinearBwdArgs])
def test_arguments_have_no_other_attributes(args_class) -> None:
    instance = args_class(None, None, None, None) if args_class is LinearFwdArgs else args_class()
    with pytest.raises(AttributeError):
        instance.wieght = None
