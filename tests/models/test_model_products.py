"""Models whose FLOPs lie in experts' einsums, torch.baddbmm, and linears of an odd K: which share an H200 has in the recipe."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from helpers.models.product_models import DLRM, GShard, Mixer, SoftMoE, TabTransformer
from torch import Tensor, nn

import te_dynamo

FP8 = "float8_current_scaling"
BF16 = torch.bfloat16


def rows(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=BF16, device="meta")


def numbers(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int64, device="meta")


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[Tensor, ...], float, float]] = {
    "GShard": (GShard, (rows(8, 2048, 1024),), 0.999, 0.999),
    "SoftMoE": (SoftMoE, (rows(256, 196, 384),), 1.0, 0.0),  # its experts are narrow
    "DLRM": (DLRM, (rows(65536, 13), numbers(65536, 26)), 0.99, 0.0),  # a step of it is CPU-bound
    "TabTransformer": (TabTransformer, (numbers(16384, 13), rows(16384, 8)), 0.99, 0.62),
    "Mixer-B/16": (Mixer, (rows(256, 3, 224, 224),), 1.0, 0.0),  # so is one of this, of a block
}
"""The model, its inputs, and the least share with a rule that names all linears, and with the cost rule alone."""


@pytest.mark.one_fast_case
@pytest.mark.cost_rule
@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_share_in_the_recipe(name: str, named: bool) -> None:
    make, inputs, *least = MODELS[name]
    with torch.device("meta"):
        model = make().to(BF16)
    found = te_dynamo.explain(model, *inputs, device="h200", options={"rules": [("", FP8)] if named else []})
    matched = sum(row.flops for row in found.linears if row.matched)
    left = [(row.module, row.shape, row.reason) for row in found.linears if not row.matched]
    assert matched / found.to_dict()["matrix_flops"]["by_weight"] >= least[not named], left


SMALL: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, ...]]]] = {
    "GShard": (lambda: GShard(64, 128, 4), lambda: (torch.randn(2, 32, 64),)),
    "SoftMoE": (lambda: SoftMoE(64, 128, 4, 4), lambda: (torch.randn(2, 32, 64),)),
    "TabTransformer": (TabTransformer, lambda: (torch.randint(256, (16, 13)), torch.randn(16, 8))),
    "Mixer-B/16": (lambda: Mixer(width=64), lambda: (torch.randn(2, 3, 224, 224),)),
}


@pytest.mark.one_fast_case
@pytest.mark.parametrize("name", SMALL)
def test_numbers_of_small_ones(name: str) -> None:
    torch.manual_seed(0)
    make, inputs = SMALL[name]
    model, given = make(), inputs()
    results = []
    for run in (model, torch.compile(model, backend="te", options={"codegen": "eager"})):
        y = run(*given)
        gradients = torch.autograd.grad(y.square().mean(), [p for p in model.parameters() if p.requires_grad])
        results.append((y, torch.cat([g.flatten() for g in gradients])))
    for expected, found in zip(*results, strict=True):
        assert 0 < (found - expected).norm() < 0.2 * expected.norm()
