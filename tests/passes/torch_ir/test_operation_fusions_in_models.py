"""passes/torch_ir/operation_fusions.py: registered fusions of operations in unmodified models."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from helpers.models.operation_chain_models import EAGER, WholeBackward, check, run
from torch import nn

import te_dynamo
from te_dynamo.errors import FusionError
from te_dynamo.operations import (
    GELU,
    BasicLinear,
    Bias,
    FusedOperation,
    SReLU,
    sliding_window,
)
from te_dynamo.operations.fused.linear_bias_activation import ForwardLinearBiasActivation


def squared_relu_forward(ops, *, recipe):
    return sliding_window(ops, (BasicLinear, Bias, SReLU), ForwardLinearBiasActivation)


def gelu_forward(ops, *, recipe):
    return sliding_window(ops, (BasicLinear, Bias, GELU), ForwardLinearBiasActivation)


def squared_relu_backward(ops, *, recipe):
    return sliding_window(ops, (BasicLinear, Bias, SReLU), WholeBackward)


class MLP(nn.Module):
    def __init__(self, activation):
        super().__init__()
        self.up, self.down, self.activation = nn.Linear(32, 64), nn.Linear(64, 32), activation

    def forward(self, x):
        return self.down(self.activation(self.up(x)))


def twice(x):
    r = F.relu(x)
    return r * r


SPELLINGS = {
    "pow": lambda x: torch.relu(x) ** 2,
    "method": lambda x: x.relu().pow(2),
    "square": lambda x: F.relu(x).square(),
    "product": twice,
}


@pytest.mark.one_fast_case
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_of_the_square(spelling):
    with te_dynamo.register_forward_fusion(squared_relu_forward):
        graphs = check(MLP(SPELLINGS[spelling]).bfloat16())
    assert "te.ForwardLinearBiasActivation(x, [up.weight, up.bias], []" in graphs["match"]
    assert "relu" not in graphs["match"].replace("SReLU", "")
    assert graphs.reports[0].fusions[0] == ("forward", "ForwardLinearBiasActivation", 1)


@pytest.mark.one_fast_case
@pytest.mark.parametrize("recipe", ["mxfp8", te_dynamo.recipe.Float8CurrentScaling(backward="high_precision")], ids=str)
def test_other_recipes(recipe):
    """Where the matcher leaves relu to Inductor, the pattern is found all the same."""
    with te_dynamo.register_forward_fusion(squared_relu_forward):
        graphs = check(MLP(SPELLINGS["pow"]).bfloat16(), {**EAGER, "recipe": recipe})
    assert "te.ForwardLinearBiasActivation" in graphs["match"]


def test_gelu_and_two_linears_in_a_chain():
    with te_dynamo.register_forward_fusion(gelu_forward):
        graphs = check(nn.Sequential(MLP(nn.GELU("tanh")), MLP(nn.GELU())).bfloat16())
    assert graphs["match"].count("= te.ForwardLinearBiasActivation") == 2


def test_a_backward_fusion_is_a_sequence():
    with te_dynamo.register_backward_fusion(squared_relu_backward):
        graphs = check(MLP(SPELLINGS["pow"]).bfloat16())
    assert "= te.sequence(x, [up.weight, up.bias], []" in graphs["match"]
    assert graphs.reports[0].fusions[0] == ("backward", "WholeBackward", 1)


def test_forward_and_backward_fusions_of_the_same_operations():
    with (
        te_dynamo.register_forward_fusion(squared_relu_forward),
        te_dynamo.register_backward_fusion(squared_relu_backward),
    ):
        graphs = check(MLP(SPELLINGS["pow"]).bfloat16())
    assert graphs["match"].count("= te.sequence(") == 1


def test_without_a_registered_fusion_nothing_changes():
    graphs, _ = run(MLP(SPELLINGS["pow"]).bfloat16())
    assert "te.relu" in graphs["match"] and "te.sequence" not in graphs["match"]


def read_elsewhere(x):
    r = torch.relu(x)
    return r**2 + r


@pytest.mark.parametrize("activation", [read_elsewhere, lambda x: torch.relu(x) ** 3], ids=["read", "cubed"])
def test_what_is_no_squared_relu_is_left(activation):
    with te_dynamo.register_forward_fusion(squared_relu_forward):
        graphs, _ = run(MLP(activation).bfloat16())
    assert "te.ForwardLinearBiasActivation" not in graphs["match"]


# ---- bad fusions


def drops_one(ops, *, recipe):
    return list(ops)[:-1]


def raises(ops, *, recipe):
    raise IndexError("no third operation")


def wraps_again(ops, *, recipe):
    found = sliding_window(ops, (BasicLinear, Bias), BackwardOrForward)
    return [BackwardOrForward((op,)) if isinstance(op, FusedOperation) else op for op in found]


class BackwardOrForward(ForwardLinearBiasActivation):
    """A forward fused operation."""


@pytest.mark.parametrize(
    ("fusion", "message"),
    [
        (drops_one, r"fusion drops_one \(.*\) returned \d basic operations for \d"),
        (raises, r"fusion raises \(.*\) failed: IndexError: no third operation"),
        (
            wraps_again,
            r"fusion wraps_again \(.*\) failed: TypeError: BackwardOrForward: a fused operation is made of basic ones",
        ),
    ],
)
def test_a_bad_fusion_is_named_and_the_model_runs_without(fusion, message):
    model = MLP(SPELLINGS["pow"]).bfloat16()
    with te_dynamo.register_forward_fusion(fusion):
        with pytest.raises((FusionError, torch._dynamo.exc.BackendCompilerFailed), match=message) as error:
            run(model)
        assert 'options={"fusions": False}' in str(error.value)
        run(model, {**EAGER, "fusions": False})


class Legacy(FusedOperation):
    """A linear and its bias, in the legacy API."""

    def fuser_forward(self, ctxs, input, params, extra_inputs, **keywords):
        ctxs[0].save_for_backward(input, params[0][0])
        return F.linear(input, params[0][0], params[1][0]), [(), ()]

    def fuser_backward(self, ctxs, grad_output, grad_extra_outputs):
        x, weight = ctxs[0].saved_tensors
        return grad_output @ weight, [(grad_output.t() @ x,), (grad_output.sum(0),)], [(), ()]


def legacy(ops, *, recipe):
    return sliding_window(ops, (BasicLinear, Bias), Legacy)


def test_a_legacy_fused_operation_breaks_the_graph_by_name_or_is_an_error():
    """A Sequential runs it between two graphs; in a model nothing of the user's could run it."""
    module = te_dynamo.Sequential(BasicLinear(32, 32), Bias(32), GELU())
    x = torch.randn(4, 32, requires_grad=True)
    model = MLP(nn.GELU()).bfloat16()
    with te_dynamo.register_forward_backward_fusion(legacy):
        torch._dynamo.reset()
        expected = torch.autograd.grad(module(x).sum(), [x, *module.parameters()])
        actual = torch.autograd.grad(torch.compile(module, backend="eager")(x).sum(), [x, *module.parameters()])
        for a, b in zip(actual, expected, strict=True):
            torch.testing.assert_close(a, b)
        torch._dynamo.reset()
        with pytest.raises(torch._dynamo.exc.Unsupported, match="Legacy has the legacy fuser_forward"):
            torch.compile(module, backend="eager", fullgraph=True)(x)
        with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="Legacy has the legacy fuser_forward"):
            run(model)
        run(model, {**EAGER, "fusions": False})
