"""The recipe "float8_rowwise" through backend "te", against a formula in plain torch."""

from __future__ import annotations

import itertools

import pytest
import torch
from helpers.models.recipe_cases import build, te, tokens
from helpers.models.snapshot_models import capture_training, compiled_run
from helpers.oracles.fp8_oracle import relative_error
from torch import Tensor
from torch.nn import functional as F

import te_dynamo
from te_dynamo import ops
from te_dynamo import recipe as recipes
from te_dynamo.recipe import Float8RowwiseScaling

FORWARD = Float8RowwiseScaling(backward="high_precision")


def by_rows(x: Tensor) -> Tensor:
    """Each row of x [M, K] after a round trip through e4m3 by its own amax, in float64."""
    scale = 448 / x.abs().amax(1, keepdim=True)
    return (x * scale).to(torch.float8_e4m3fn).double() / scale.double()


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    product = by_rows(x.reshape(-1, x.shape[-1])) @ by_rows(weight).t()
    return (product + bias.double()).float().reshape(*x.shape[:-1], -1)


@pytest.mark.parametrize("name, bound", [("linear", 1e-6), ("gelu_mlp", 5e-3)])
def test_forward_equals_the_formula(name: str, bound: float) -> None:
    model, x = build(name), tokens(24)
    x = x * torch.logspace(-3, 3, x.shape[1])[:, None]  # a tensor's scale would lose the smallest rows
    with torch.no_grad():
        linears = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
        expected = linear(x, linears[0].weight, linears[0].bias)
        if len(linears) > 1:
            expected = linear(F.gelu(expected, approximate="tanh"), linears[1].weight, linears[1].bias)
    found = te(model, FORWARD)(x)
    assert found.requires_grad
    rows = zip(found.flatten(0, 1), expected.flatten(0, 1), strict=True)
    assert max(relative_error(*row) for row in rows) < bound


def test_its_name_in_other_libraries() -> None:
    assert recipes.by_name("rowwise") == recipes.by_name("float8_rowwise") == Float8RowwiseScaling()
    assert "rowwise" not in recipes.names()


class Residual(torch.nn.Module):
    """x + down(relu(up(x)))."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(64, 128), torch.nn.Linear(128, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.relu(self.up(x)))


def test_a_residual_stream_is_added_in_the_gemm() -> None:
    graphs = capture_training(Residual, (32, 64), "cpu", recipe="float8_rowwise")
    assert graphs["forward"].count(", addend=x") == 1
    x = torch.randn(32, 64, dtype=torch.bfloat16)
    fused, apart = (
        compiled_run(Residual, {"codegen": "eager", "recipe": "float8_rowwise", "fusions": fusions})(x)
        for fusions in (True, False)
    )
    assert all(map(torch.equal, fused.outputs, apart.outputs))
    assert all(torch.equal(value, apart.gradients[name]) for name, value in fused.gradients.items())


def test_a_wgrad_in_high_precision() -> None:
    """Forward saves x as it is; neither x nor dy has a columnwise copy, and dx is that of the recipe."""
    recipe = Float8RowwiseScaling(wgrad="bf16")
    graphs = capture_training(Residual, (32, 64), "cpu", recipe=recipe)
    text = graphs["forward"] + graphs["backward"]
    assert text.count("= aten.mm(") == 2 and text.count(", e5m2 by rows[row]") == 4
    assert "te.quantize(x, e4m3 by rows[row])" in text
    assert "te.activation_quantize(gemm, 'relu', e4m3 by rows[row], keep_output=True)" in text
    x = torch.randn(32, 64, dtype=torch.bfloat16)
    mixed, quantized, plain = (
        compiled_run(Residual, {"codegen": "eager", "recipe": each})(x)
        for each in (recipe, Float8RowwiseScaling(), Float8RowwiseScaling(backward="high_precision"))
    )
    assert torch.equal(mixed.outputs[0], plain.outputs[0])
    assert torch.equal(mixed.gradients["x"], quantized.gradients["x"])
    assert torch.equal(mixed.gradients["down.weight"], plain.gradients["down.weight"]), "dy is exact there"


def test_operations_save_x_for_it() -> None:
    """te_dynamo.ops and nn.Linear's match give the same bits."""
    recipe = Float8RowwiseScaling(wgrad="bf16")
    module = te_dynamo.Sequential(ops.BasicLinear(64, 128, recipe=recipe)).bfloat16()
    (weight,) = module.parameters()
    x = torch.randn(32, 64, dtype=torch.bfloat16)
    dy = torch.randn(32, 128, dtype=torch.bfloat16)
    found = []
    for needs_dx, function in itertools.product((True, False), ("ops", "compiled")):
        given = x.clone().requires_grad_(needs_dx)
        if function == "ops":
            y = module(given)
        else:
            backend = {"backend": "te", "options": {"codegen": "eager", "recipe": recipe}}
            y = torch.compile(lambda x: F.linear(x, weight), **backend)(given)
        wanted = (given, weight) if needs_dx else (weight,)
        found.append((y.detach(), *torch.autograd.grad(y, wanted, dy)))
    for one, other in zip(found[::2], found[1::2], strict=True):
        assert all(map(torch.equal, one, other))
    assert torch.equal(found[0][-1], dy.t() @ x) and torch.equal(found[2][-1], dy.t() @ x)
