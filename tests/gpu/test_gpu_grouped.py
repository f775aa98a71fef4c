"""A mixture's experts through the whole pipeline on a GPU: against the same experts in bf16, and against the graphs as they
are."""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import te_dynamo
from te_dynamo.recipe import MXFP8BlockScaling, Recipe

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import models

pytestmark = pytest.mark.gpu

WIDTH, INNER, GROUPS = 256, 384, 6
RULES = [("", "float8_current_scaling")]
"""Named by a rule: experts this small are left in bf16 otherwise."""
RECIPES = ["float8_current_scaling", "float8_block_scaling", "mxfp8", MXFP8BlockScaling(scale_block=128)]


class Mixture(nn.Module):
    """A router that sends each token to two experts, the experts, and the weighted sum of what they give."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, GROUPS, bias=False)
        self.experts = models.Experts(WIDTH, INNER, GROUPS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = torch.topk(self.router(x).float().softmax(-1), 2)
        _, order = torch.sort(chosen.flatten(), stable=True)
        ends = (chosen.flatten()[:, None] == torch.arange(GROUPS, device=x.device)).sum(0).cumsum(0).int()
        y = self.experts(x[order // 2], ends) * weights.flatten()[order, None].to(x.dtype)
        return torch.zeros_like(x).index_add(0, order // 2, y)


def experts() -> tuple[models.Experts, torch.Tensor]:
    torch.manual_seed(0)
    model = models.Experts(WIDTH, INNER, GROUPS).to("cuda", torch.bfloat16)
    return model, torch.tensor([100, 100, 133, 400, 401, 500], device="cuda", dtype=torch.int32)


def step(model: nn.Module, x: torch.Tensor, *args: torch.Tensor) -> list[torch.Tensor]:
    """Output and every gradient of one forward and backward; the gradient of the output is the same on every device."""
    model.zero_grad()
    x.grad = None
    y = model(x, *args)
    torch.manual_seed(1)
    y.backward(torch.randn(y.shape).to(y))
    return [y.detach().clone(), x.grad.clone(), *(p.grad.clone() for p in model.parameters())]


def compiled(model: nn.Module, **options: object) -> nn.Module:
    torch._dynamo.reset()
    return torch.compile(copy.deepcopy(model), backend="te", options={"rules": RULES, **options})


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


def tokens(count: int) -> torch.Tensor:
    return torch.randn(count, WIDTH, device="cuda", dtype=torch.bfloat16, requires_grad=True)


@pytest.mark.parametrize("recipe", RECIPES)
def test_experts_against_bf16_and_against_the_graphs(recipe: str | Recipe) -> None:
    model, ends = experts()
    x, rules = tokens(500), [("", recipe)]
    fused, through_inductor = (compiled(model, rules=rules, codegen=codegen) for codegen in ("eager", "inductor"))
    exact, fused, through_inductor = (step(m, x, ends) for m in (model, fused, through_inductor))
    unfused = step(compiled(model, rules=rules, codegen="eager", fusions=False), x, ends)
    for which, reference in enumerate(exact):
        assert 0 < relative(fused[which], reference) < (0.08 if which == 0 else 0.15)
        assert torch.equal(fused[which], unfused[which])
        assert relative(through_inductor[which], fused[which]) < 5e-2
    assert not through_inductor[2][1].any(), "an expert without tokens has no gradient"


def test_kernels_equal_the_reference_on_the_cpu() -> None:
    model, ends = experts()
    x = tokens(500)
    on_gpu = step(compiled(model, codegen="eager"), x, ends)
    on_cpu = step(compiled(model.cpu(), codegen="eager"), x.detach().cpu().requires_grad_(), ends.cpu())
    for actual, expected in zip(on_gpu[:2], on_cpu[:2], strict=True):
        assert relative(actual.cpu(), expected) < 2e-2


def test_rows_behind_the_last_group_are_zero() -> None:
    model, ends = experts()
    y, dx, *_ = step(compiled(model), tokens(700), ends)
    assert not y[500:].any() and not dx[500:].any()


def test_a_whole_mixture_is_one_graph_without_a_synchronization() -> None:
    torch.manual_seed(0)
    model = Mixture().to("cuda", torch.bfloat16)
    x = tokens(300)
    explanation = te_dynamo.explain(model, x, options={"rules": RULES, "codegen": "inductor"})
    assert len(explanation.graph_breaks) == 0 and [r.groups for r in explanation.linears] == [0, GROUPS, GROUPS]
    lowered = explanation.to_dict()["lowered"]
    assert lowered and all("reference" not in str(row) for row in lowered)
    compiled_model = compiled(model)
    y = step(compiled_model, x)[0]
    assert 0 < relative(y, step(model, x)[0]) < 0.12  # a token between two experts may go to the other
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = compiled_model(x)
        again.backward(torch.ones_like(again))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert relative(again, y) < 1e-3  # index_add's order of additions is the GPU's


def test_cuda_graphs_follow_the_routing() -> None:
    """Captured with one routing, replayed with another: no group size is in the graph."""
    model, _ = experts()
    plain = compiled(model)
    graphed = {"rules": RULES, **torch._inductor.list_mode_options("reduce-overhead")}
    run = torch.compile(copy.deepcopy(model), backend="te", options=graphed)
    x = tokens(500)
    for sizes in ([100, 0, 33, 267, 1, 99], [0, 500, 0, 0, 0, 0], [83, 83, 83, 83, 84, 84], [250, 0, 0, 0, 0, 250]):
        new_ends = torch.tensor(sizes, device="cuda").cumsum(0).int()
        for actual, expected in zip(step(run, x, new_ends), step(plain, x, new_ends), strict=True):
            torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def test_dynamic_tokens_compile_once() -> None:
    model, _ = experts()
    torch._dynamo.reset()
    run = torch.compile(copy.deepcopy(model), backend="te", dynamic=True, options={"rules": RULES})
    for index, count in enumerate((90, 300, 1111)):
        x = tokens(count)
        new_ends = torch.arange(1, GROUPS + 1, device="cuda").mul(count // GROUPS).int()
        new_ends[-1] = count
        with torch._dynamo.config.patch(error_on_recompile=index > 0):
            results = step(run, x, new_ends)
        exact = step(model, x, new_ends)
        assert max(map(relative, results, exact)) < 0.15
