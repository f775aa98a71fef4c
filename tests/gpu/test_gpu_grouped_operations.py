"""GroupedLinear and GroupedMLP on a GPU: fused against unfused, compiled against eager, FP8 against high precision."""

from __future__ import annotations

import pytest
import torch

from te_dynamo import Sequential
from te_dynamo.operations.basic import GroupedLinear, ScaledSwiGLU
from te_dynamo.recipe import Float8CurrentScaling, Recipe

pytestmark = pytest.mark.gpu

GROUPS, WIDTH, INNER = 6, 256, 384


def experts(recipe: Recipe | None, fusions: bool = True) -> Sequential:
    torch.manual_seed(0)
    ops = GroupedLinear(GROUPS, WIDTH, 2 * INNER), ScaledSwiGLU(), GroupedLinear(GROUPS, INNER, WIDTH)
    return Sequential(*ops, recipe=recipe, fusions=fusions, device="cuda", dtype=torch.bfloat16)


def step(run: object, module: Sequential) -> list[torch.Tensor]:
    """Output and every gradient, with an empty group, ragged ones, and rows behind the last."""
    torch.manual_seed(1)
    x = torch.randn(512, WIDTH, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    scales = torch.rand(512, device="cuda", requires_grad=True)
    offs = torch.tensor([100, 100, 133, 400, 401, 500], device="cuda", dtype=torch.int32)
    y = run(x, offs, scales, offs)  # type: ignore[operator]
    return [y.detach(), *torch.autograd.grad(y, [x, scales, *module.parameters()], torch.randn_like(y))]


def near(found: list[torch.Tensor], expected: list[torch.Tensor], tolerance: float) -> None:
    for a, b in zip(found, expected, strict=True):
        assert a.isfinite().all() and (a.float() - b.float()).norm() <= tolerance * b.float().norm()


def test_fp8_is_near_high_precision() -> None:
    """And rows behind the last group are zero in both."""
    results = [step(module, module) for module in (experts(Float8CurrentScaling()), experts(None))]
    near(*results, 0.15)
    for y, dx, *_ in results:
        assert not y[500:].any() and not dx[500:].any()


@pytest.mark.parametrize("recipe", [Float8CurrentScaling(), None], ids=["fp8", "none"])
def test_fused_is_unfused(recipe: Recipe | None) -> None:
    fused, unfused = (experts(recipe, fusions) for fusions in (True, False))
    for a, b in zip(step(fused, fused), step(unfused, unfused), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("recipe", [Float8CurrentScaling(), None], ids=["fp8", "none"])
def test_compiled_is_eager(recipe: Recipe | None) -> None:
    module = experts(recipe)
    torch._dynamo.reset()
    near(step(torch.compile(module, backend="te", fullgraph=True), module), step(module, module), 0.02)
