"""Fusions of one half: fused against unfused, in all four combinations of forward and backward."""

import pytest
import torch
from helpers.graphs.operation_lists import BY_NAME, LISTS
from helpers.models.operation_runs import TOLERANCE, Case, all_four, assert_agree

import te_dynamo
from te_dynamo.errors import InputError
from te_dynamo.operations import (
    GELU,
    QGELU,
    AddExtraInput,
    BasicLinear,
    Bias,
    ConstantScale,
    MakeExtraOutput,
    OperationFuser,
    ReLU,
    RMSNorm,
    SiLU,
)
from te_dynamo.operations.fused import SHIPPED

FP8 = te_dynamo.recipe.Float8CurrentScaling(power_of_two_scales=True)
MXFP8 = te_dynamo.recipe.MXFP8BlockScaling()
BF16_BACKWARD = te_dynamo.recipe.Float8CurrentScaling(power_of_two_scales=True, backward="high_precision")

RECIPES = {"high": None, "fp8": FP8, "mxfp8": MXFP8, "high-precision-backward": BF16_BACKWARD}


def tolerance(recipe):
    return TOLERANCE["high" if recipe is None else "fp8"]


@pytest.fixture(params=RECIPES, name="recipe")
def _recipe(request):
    return RECIPES[request.param]


@pytest.mark.parametrize("activation", [GELU("tanh"), QGELU()], ids=["gelu", "qgelu"])
def test_linear_bias_activation(recipe, activation):
    case = Case([BasicLinear(64, 96), Bias(96), activation, BasicLinear(96, 32), Bias(32)], recipe, (3, 32, 64))
    unfused, fused = all_four(case, tolerance(recipe))
    assert fused.forward == ["ForwardLinearBiasActivation", "ForwardLinearBiasActivation"]
    assert unfused.forward == ["BasicLinear", "Bias", type(activation).__name__, "BasicLinear", "Bias"]


@pytest.mark.parametrize("activation", [GELU(), ReLU(), SiLU()], ids=["gelu", "relu", "silu"])
def test_activation_bias(recipe, activation):
    case = Case([BasicLinear(64, 96), Bias(96), activation], recipe, (3, 32, 64))
    _, fused = all_four(case, tolerance(recipe))
    assert fused.backward == (
        ["BackwardActivationBias"] if recipe in (FP8, MXFP8) else ["BasicLinear", "Bias", type(activation).__name__]
    )


def test_activation_bias_is_bit_equal():
    """The kernel rounds dz where the activation's own does: no result differs."""
    case = Case([BasicLinear(64, 96), Bias(96), GELU()], FP8, (96, 64))
    exact = case.run(fused_forward=False, fused_backward=False)
    assert_agree(case.run(fused_forward=False, fused_backward=True), exact, dict(rtol=0.0, atol=0.0))


def test_activation_without_bias():
    case = Case([BasicLinear(64, 96), ReLU()], FP8, (96, 64))
    _, fused = all_four(case, TOLERANCE["fp8"])
    assert fused.backward == ["BackwardActivationBias"]


@pytest.mark.parametrize("needs", [(True, False, True), (False, True, True)], ids=["dgrad", "wgrad"])
def test_only_the_gradients_asked_for(needs):
    case = Case([BasicLinear(64, 96), Bias(96), GELU(), BasicLinear(96, 32), Bias(32)], FP8, (64, 64), needs=needs)
    _, fused = all_four(case, TOLERANCE["fp8"])
    assert (fused.grads[0] is not None) == needs[0]
    assert [g is not None for g in fused.grads[1:]] == [needs[1]] * 4
    assert fused.backward[0] == "BackwardActivationBias"


@pytest.mark.parametrize("bias", [True, False])
def test_linear_bias_add(recipe, bias):
    ops = [BasicLinear(64, 96), *[Bias(96)] * bias, AddExtraInput()]
    _, fused = all_four(Case(ops, recipe, (3, 32, 64), extra_shape=(3, 32, 96)), tolerance(recipe))
    assert fused.forward == ["ForwardLinearBiasAdd"]


def test_linear_scale_add(recipe):
    ops = [BasicLinear(64, 96), ConstantScale(0.75), AddExtraInput()]
    _, fused = all_four(Case(ops, recipe, (3, 32, 64), extra_shape=(3, 32, 96)), tolerance(recipe))
    assert fused.forward == ["ForwardLinearScaleAdd"]
    assert fused.backward[0] == ("BackwardLinearScale" if recipe is FP8 else "BasicLinear")


@pytest.mark.parametrize("fused", [False, True])
def test_an_extra_input_of_another_shape_is_an_error(fused):
    case = Case([BasicLinear(64, 96), AddExtraInput()], FP8, (32, 64), extra_shape=(1, 96))
    with pytest.raises(InputError, match=r"AddExtraInput: the extra input has the shape \[1, 96\]"):
        case.run(fused_forward=fused, fused_backward=False)


@pytest.mark.parametrize("scale", [0.5, 0.75, -3.0, 0.0])
def test_linear_scale(scale):
    case = Case([BasicLinear(64, 96), ConstantScale(scale)], FP8, (3, 32, 64))
    _, fused = all_four(case, TOLERANCE["fp8"])
    assert fused.backward == ["BackwardLinearScale"]


def test_linear_scale_by_a_power_of_two_is_bit_equal():
    case = Case([BasicLinear(64, 96), ConstantScale(0.25)], FP8, (96, 64))
    exact = case.run(fused_forward=False, fused_backward=False)
    assert_agree(case.run(fused_forward=False, fused_backward=True), exact, dict(rtol=0.0, atol=0.0))


def test_backward_linear_add(recipe):
    case = Case([MakeExtraOutput(), BasicLinear(64, 96)], recipe, (3, 32, 64))
    _, fused = all_four(case, tolerance(recipe))
    assert fused.backward == ["BackwardLinearAdd"]
    assert len(fused.outputs) == 2


@pytest.mark.parametrize("ops", [[BasicLinear(64, 96), AddExtraInput()], [MakeExtraOutput(), BasicLinear(64, 96)]])
def test_sums_in_the_gemm_are_bit_equal(recipe, ops):
    """te.gemm rounds the product before it adds, as the two operations do; and the extra input keeps its values."""
    case = Case(ops, recipe, (3, 32, 64), extra_shape=(3, 32, 96))
    apart = case.run(fused_forward=False, fused_backward=False)
    assert_agree(case.run(fused_forward=True, fused_backward=True), apart, dict(rtol=0.0, atol=0.0))


@pytest.mark.parametrize("recipe", [FP8, None], ids=["fp8", "none"])
def test_an_extra_input_keeps_its_values(recipe):
    module = te_dynamo.Sequential(BasicLinear(64, 96), AddExtraInput(), recipe=recipe)
    x, extra = torch.randn(32, 64), torch.randn(32, 96)
    kept = extra.clone()
    with torch.no_grad():
        assert module(x, extra).data_ptr() != extra.data_ptr()
    assert torch.equal(extra, kept)


@pytest.mark.parametrize("zero_centered", [False, True])
def test_backward_add_rms_norm(recipe, zero_centered):
    ops = [MakeExtraOutput(), RMSNorm(64, zero_centered=zero_centered), SiLU(), BasicLinear(64, 96)]
    _, fused = all_four(Case(ops, recipe, (3, 32, 64)), tolerance(recipe))
    assert "BackwardAddRMSNorm" in fused.backward


@pytest.mark.parametrize("name", [name for name in LISTS if BY_NAME[name] not in SHIPPED["joint"]])
def test_every_shipped_fusion_of_one_half(name):
    """Also one that nobody thought of here: its list is that of its snapshot."""
    unfused, fused = all_four(Case(LISTS[name], FP8, (32, 64), extra_shape=(32, 64)), TOLERANCE["fp8"])
    assert (fused.forward, fused.backward) != (unfused.forward, unfused.backward)


class DoubledLinear(BasicLinear):
    """A subclass that computes something else."""

    def op_forward_compute(self, input, params, *, requires_grad, **keywords):
        output, saved = super().op_forward_compute(input, params, requires_grad=requires_grad, **keywords)
        return 2 * output, saved


def test_a_subclass_is_not_fused_as_its_base():
    case = Case([DoubledLinear(64, 96), Bias(96)], FP8, (32, 64))
    assert case.run(fused_forward=True, fused_backward=True).forward == ["DoubledLinear", "Bias"]


@pytest.mark.parametrize("backend", ["aot_eager", "te"])
def test_compiled_whole(backend):
    """Most of the fusions of one half in one list, traced with fullgraph=True."""
    torch._dynamo.reset()
    ops = [
        MakeExtraOutput(),
        BasicLinear(64, 96),
        Bias(96),
        GELU(),
        BasicLinear(96, 32),
        ConstantScale(0.5),
        AddExtraInput(),
    ]
    module = te_dynamo.Sequential(*ops, recipe=FP8, dtype=torch.bfloat16)
    fused = OperationFuser(module.ops, recipe=FP8).fuse()
    assert [type(group.op).__name__ for group in fused.forward] == [
        "MakeExtraOutput",
        "ForwardLinearBiasActivation",
        "ForwardLinearScaleAdd",
    ]
    assert [type(group.op).__name__ for group in fused.backward] == [
        "MakeExtraOutput",
        "BackwardActivationBias",
        "BackwardLinearScale",
        "AddExtraInput",
    ]
    x, extra = (torch.randn(8, 16, n, dtype=torch.bfloat16, requires_grad=True) for n in (64, 32))
    options = {"codegen": "eager"} if backend == "te" else None
    results = []
    for run in (module, torch.compile(module, backend=backend, fullgraph=True, options=options)):
        y, branch = run(x, extra)
        loss = y.float().square().mean() + branch.float().square().mean()
        results.append([y, *torch.autograd.grad(loss, [x, extra, *module.parameters()])])
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, eager, rtol=0.02, atol=1e-4)
