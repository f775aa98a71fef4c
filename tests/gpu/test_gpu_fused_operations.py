"""Fused operations on a GPU: the kernels in place of the references."""

import pytest
import torch
from helpers.models.operation_runs import TOLERANCE, Case, all_four

import te_dynamo
from te_dynamo.operations import (
    GELU,
    AddExtraInput,
    BasicLinear,
    Bias,
    ConstantScale,
    LayerNorm,
    MakeExtraOutput,
    RMSNorm,
    SwiGLU,
)
from te_dynamo.operations.fused import layer_norm_mlp

pytestmark = pytest.mark.gpu

FP8 = te_dynamo.recipe.Float8CurrentScaling(power_of_two_scales=True)

LISTS = {
    "activation": [BasicLinear(256, 384), Bias(384), GELU("tanh"), BasicLinear(384, 128), Bias(128)],
    "add": [MakeExtraOutput(), BasicLinear(256, 384), Bias(384), AddExtraInput()],
    "scale": [BasicLinear(256, 384), ConstantScale(0.5), AddExtraInput()],
}
MLPS = {
    "gelu": [LayerNorm(256), BasicLinear(256, 384), Bias(384), GELU(), BasicLinear(384, 128), Bias(128)],
    "swiglu": [RMSNorm(256), BasicLinear(256, 768), SwiGLU(), BasicLinear(384, 128)],
}


def case(ops, width):
    return Case(ops, FP8, (4, 64, 256), extra_shape=(4, 64, width), device="cuda")


@pytest.mark.parametrize("name", LISTS)
def test_one_half(name):
    all_four(case(LISTS[name], 384), TOLERANCE["fp8"])


@pytest.mark.parametrize("recompute", [None, "activation"])
@pytest.mark.parametrize("name", MLPS)
def test_mlp(name, recompute):
    mine = case(MLPS[name], 128)
    with te_dynamo.register_forward_backward_fusion(layer_norm_mlp(recompute)):
        fused = mine.run(fused_forward=True, fused_backward=True)
    assert fused.forward == fused.backward == ["LayerNormMLP"]
    apart = mine.run(fused_forward=False, fused_backward=False)
    # A bias in the epilogue is rounded once with its sum, apart twice: where that moves a code of the activation by a step, a
    # whole row of the output moves with it.
    for a, b in zip(fused.outputs + fused.grads, apart.outputs + apart.grads, strict=True):
        assert a is not None and b is not None and a.dtype == b.dtype
        assert (a.double() - b.double()).norm() <= 0.02 * b.double().norm()


@pytest.mark.parametrize("recompute", [None, "activation"])
def test_compiled(recompute):
    """Inductor's code gives what the eager Sequential does."""
    torch._dynamo.reset()
    with te_dynamo.register_forward_backward_fusion(layer_norm_mlp(recompute)):
        module = te_dynamo.Sequential(*MLPS["swiglu"], recipe=FP8, dtype=torch.bfloat16, device="cuda")
        x = torch.randn(4, 64, 256, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        results = []
        for run in (module, torch.compile(module, backend="te", fullgraph=True)):
            y = run(x)
            results.append([y, *torch.autograd.grad(y.float().square().mean(), [x, *module.parameters()])])
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, eager, rtol=0.125, atol=0.0675)
