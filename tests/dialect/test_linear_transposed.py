"""A linear of a weight that is stored as [K, N], GPT-2's Conv1D say: the bits of the one of [N, K], in every recipe."""

from __future__ import annotations

import pytest
import torch
from helpers.models.recipe_cases import RECIPES
from torch import Tensor

from te_dynamo import to_tensor_proto
from te_dynamo.dialect.linear import LinearConfig, LinearFwdArgs, linear_forward, linear_forward_fake
from te_dynamo.recipe import Float8CurrentScaling
from te_dynamo.weights.quantize_weight import quantize_weight

N, K = 96, 160  # a block of 128 and the start of another, and less than one


def config(recipe: str, transposed: bool, *, x: bool = True, weight: bool = True) -> LinearConfig:
    grads = {"input_requires_grad": x, "weight_requires_grad": weight}
    return LinearConfig.from_recipe(RECIPES[recipe], weight_transposed=transposed, **grads)


def operands(dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(2, 67, K).to(dtype), torch.randn(N, K).to(dtype), torch.randn(N).to(dtype)


def results(recipe: str, transposed: bool, workspace: bool, bias: bool) -> list[Tensor]:
    """Output and gradients, the weight's as [N, K]."""
    x, w, b = (t.requires_grad_() for t in operands())
    setting = config(recipe, transposed)
    stored = w.detach().t().contiguous().requires_grad_() if transposed else w
    args = (x, stored, b if bias else None, setting)
    if workspace:
        buffers = quantize_weight(stored, setting.weight_quantizer)[0].buffers()
        y = torch.ops.te.linear_with_workspace(*args, buffers)[0]
    else:
        y = torch.ops.te.linear(*args)[0]
    y.backward(torch.sin(torch.arange(y.numel()).reshape(y.shape)).to(y.dtype))
    assert stored.grad.is_contiguous(), "in the layout that AccumulateGrad keeps without a copy"
    return [y.detach(), x.grad, stored.grad.t() if transposed else stored.grad, *([b.grad] if bias else [])]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(("workspace", "bias"), [(False, True), pytest.param(True, False, marks=pytest.mark.slow)])
def test_it_has_the_bits_of_the_weight_transposed(recipe: str, workspace: bool, bias: bool) -> None:
    # The CPU adds products up in another order where operands change sides: wgrad's, and a dgrad's in high precision.
    close = 2**-7
    tolerances = [0.0, close if RECIPES[recipe].backward == "high_precision" else 0.0, close, 0.0]
    pairs = zip(results(recipe, True, workspace, bias), results(recipe, False, False, bias), strict=True)
    for (one, other), tolerance in zip(pairs, tolerances, strict=False):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(
    ("x_grad", "weight_grad"),
    [(True, True), (False, False), *(pytest.param(*g, marks=pytest.mark.slow) for g in ((True, False), (False, True)))],
)
def test_real_and_fake_agree(recipe: str, x_grad: bool, weight_grad: bool) -> None:
    x, w, b = operands()
    stored, setting = w.t().contiguous(), config(recipe, True, x=x_grad, weight=weight_grad)
    real_out, real_saved = linear_forward(LinearFwdArgs(x, stored, b, setting))
    out, saved = linear_forward_fake(to_tensor_proto(x), to_tensor_proto(stored), b.shape, setting)
    assert out == to_tensor_proto(real_out)
    buffers = iter(real_saved)
    for proto in saved:
        proto.check_layout({slot: next(buffers) for slot in proto.inner_names()})
    assert next(buffers, None) is None

    # Of a frozen weight there are the buffers alone: its shape follows from them.
    kept = quantize_weight(stored, setting.weight_quantizer)[0].buffers()
    fake = torch.ops.te.linear_with_workspace
    with torch._subclasses.FakeTensorMode() as mode:
        args = [mode.from_tensor(t) for t in (x, *kept)]
        assert fake(args[0], None, None, setting, args[1:])[0].shape == real_out.shape


def test_what_is_quantized_for_inference_and_what_it_is_called() -> None:
    setting = config(Float8CurrentScaling().describe(), True, x=False, weight=False)
    assert setting.describe() == "linear(x e4m3[row], w e4m3[column], dy e5m2[row+column]) of [K, N]"
    setting = config(Float8CurrentScaling().describe(), True, x=True, weight=False)
    assert setting.describe() == "linear(x e4m3[row], w e4m3[row+column], dy e5m2[row+column]) of [K, N]"
