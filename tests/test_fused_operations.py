"""Fusions of one half: fused against unfused, in all four combinations of forward and backward."""

import pytest
from operation_runs import TOLERANCE, Case, all_four, assert_agree

import te_dynamo
from te_dynamo.operations import GELU, QGELU, BasicLinear, Bias, ReLU, SiLU

FP8 = te_dynamo.recipe.Float8CurrentScaling(power_of_two_scales=True)
MXFP8 = te_dynamo.recipe.MXFP8BlockScaling()
BF16_BACKWARD = te_dynamo.recipe.Float8CurrentScaling(power_of_two_scales=True, backward="high_precision")

RECIPES = {"high": None, "fp8": FP8, "mxfp8": MXFP8, "high-precision-backward": BF16_BACKWARD}


def tolerance(recipe):
    return TOLERANCE["high" if recipe is None else "fp8"]


@pytest.fixture(params=RECIPES, name="recipe")
def _recipe(request):
    return RECIPES[request.param]


def quantizes_dy(recipe):
    return recipe is FP8


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
        ["BackwardActivationBias"] if quantizes_dy(recipe) else ["BasicLinear", "Bias", type(activation).__name__]
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
