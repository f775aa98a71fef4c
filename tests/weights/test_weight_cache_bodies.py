"""Kept weights that bodies of higher-order ops read: checkpointed regions, compile regions; a loop's experts."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from helpers.models.checkpointed import Checkpointed, selective
from helpers.models.small_models import SwiGLU
from helpers.weights.kept_weights import CODEGENS, STEP, WIDTH, assert_same, te, tokens, train
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import te_dynamo
from te_dynamo.weights.frozen import is_dropped

POLICIES = {"whole": {}, "products": {"context_fn": selective([torch.ops.aten.mm.default])}}
ONE_POLICY = pytest.mark.parametrize("policy", ["whole", pytest.param("products", marks=pytest.mark.slow)])


def checkpointed(policy: str = "whole", width: int = WIDTH) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Checkpointed(SwiGLU(width), **POLICIES[policy]) for _ in range(2))).bfloat16()


def quantized_in(graph: torch.fx.Graph, model: nn.Module) -> list[Any]:
    """What te.quantize reads that has a weight's shape."""
    weights = {parameter.shape for parameter in model.parameters()}
    sources = [n.args[0] for n in graph.nodes if str(n.target).startswith("te.quantize")]
    assert sources
    return [s for s in sources if isinstance(s, list) or s.meta["val"].shape in weights]


@pytest.mark.one_fast_case
@pytest.mark.parametrize("codegen", CODEGENS)
@pytest.mark.parametrize("policy", POLICIES)
def test_one_quantization_a_weight_a_step(policy: str, codegen: str, quantized) -> None:
    """In forward, in its recomputation and in further microbatches: the same bits as without the cache."""
    batches = [tokens(), tokens() * 2, tokens() * 3]
    results = []
    for options in ({}, STEP):
        torch._dynamo.reset()
        model = checkpointed(policy)
        with te_dynamo.capture() as graphs:
            results.append(train(model, te(model, codegen=codegen, **options), batches, steps=2))
    for ours, theirs in zip(*results, strict=True):
        assert_same(ours, theirs)
    assert len(quantized) == 2 * 6
    for phase in ("forward", "backward"):
        assert not quantized_in(graphs.graph(phase), model), phase


@ONE_POLICY
def test_the_recomputation_reads_what_forward_read(policy: str) -> None:
    """A write between forward and backward changes nothing, as without a checkpoint."""
    model, x = checkpointed(policy), tokens().requires_grad_()
    state = copy.deepcopy(model.state_dict())
    compiled = te(model, **STEP)
    gradients = []
    for writes in (False, True):
        model.load_state_dict(state)
        loss = compiled(x).float().square().sum()
        if writes:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(-3)
            te_dynamo.invalidate(model)
            compiled(x)
        gradients.append(torch.autograd.grad(loss, (x, *model.parameters())))
    for ours, theirs in zip(*gradients, strict=True):
        assert_same(ours, theirs)


@pytest.mark.parametrize("reentrant", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_checkpoint_around_a_compiled_model(reentrant: bool, quantized) -> None:
    """What compiling saves on fake tensors is not counted: the recomputation does not compile."""
    results = []
    for options in ({}, STEP):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = SwiGLU(WIDTH).bfloat16()
        compiled = te(model, **options)
        batches = [tokens().requires_grad_()] * 2
        results.append(train(model, lambda x: checkpoint(compiled, x, use_reentrant=reentrant), batches, 2))  # noqa: B023
    for ours, theirs in zip(*results, strict=True):
        assert_same(ours, theirs)
    assert len(quantized) == (2 + reentrant) * 3, "a reentrant one's first forward knows of no backward: rows alone"


def test_a_linear_before_a_region_and_one_behind() -> None:
    """Their rewriting changes what the region's call is given."""
    one, two, three = (nn.Linear(32, 32) for _ in range(3))
    x = torch.randn(8, 32)

    def forward(x: Tensor) -> Tensor:
        return three(checkpoint(two, one(x), use_reentrant=False))

    results = []
    for options in ({}, STEP):
        torch._dynamo.reset()
        results.append(torch.autograd.grad(te(forward, **options)(x).sum(), [one.weight, two.weight, three.weight]))
    for ours, theirs in zip(*results, strict=True):
        assert_same(ours, theirs)


def test_who_reads_a_weight_shares_what_is_kept(quantized) -> None:
    """Tied between two regions, one within another, and the graph around them."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = SwiGLU(96)  # too narrow for stacks, whose dx is rounded otherwise

        def inner(self, x: Tensor) -> Tensor:
            return x + checkpoint(self.mlp, x, use_reentrant=False)

        def forward(self, x: Tensor) -> Tensor:
            x = checkpoint(self.mlp, checkpoint(self.inner, x, use_reentrant=False), use_reentrant=False)
            return x + self.mlp.down(self.mlp.up(x))

    results = []
    for options in ({}, STEP):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Tied().bfloat16()
        results.append(train(model, te(model, **options), [tokens(96), tokens(96) * 2], steps=2))
    for ours, theirs in zip(*results, strict=True):
        assert_same(ours, theirs)
    assert len(quantized) == 2 * 3


def test_calls_of_one_compile_region_have_buffers_of_their_own(quantized) -> None:
    from torch.compiler import nested_compile_region

    results = []
    for options in ({}, STEP):
        torch._dynamo.reset()
        torch.manual_seed(0)
        layers = nn.ModuleList([SwiGLU(WIDTH), SwiGLU(WIDTH)]).bfloat16()
        run = nested_compile_region(lambda layer, x: layer(x))
        call = te(lambda x: run(layers[1], run(layers[0], x)), **options)  # noqa: B023
        with te_dynamo.capture() as graphs:
            results.append(train(layers, call, [tokens(), tokens() * 2], steps=2))
    for ours, theirs in zip(*results, strict=True):
        assert_same(ours, theirs)
    assert len(quantized) == 2 * 6
    assert len(graphs.reports[0].workspaces) == 4


@ONE_POLICY
def test_frozen_weights_of_a_checkpointed_region(policy: str, quantized) -> None:
    model, x = checkpointed(policy).requires_grad_(False), tokens().requires_grad_()
    (expected,) = torch.autograd.grad(te(model)(x).sum(), x)
    torch._dynamo.reset()
    compiled = te(te_dynamo.freeze(model, drop_weights=True))
    for _ in range(2):
        assert_same(*torch.autograd.grad(compiled(x).sum(), x), expected)
    assert len(quantized) == 6 and all(is_dropped(parameter) for parameter in model.parameters())
    model.requires_grad_(True)
    torch._dynamo.reset()  # torch 2.11 has no guard that sees it
    with pytest.raises(Exception, match=r"'0.inner.gate.weight' is frozen for inference and would get a gradient"):
        compiled(x)


def test_a_body_that_is_not_given_buffers_quantizes_in_each_call(quantized) -> None:
    """torch.cond has one list of operands for two bodies."""
    one, two = (SwiGLU(WIDTH).bfloat16().requires_grad_(False) for _ in range(2))

    def branches(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, one, two, (x,))

    x = tokens()
    with torch.no_grad():
        expected = [te(branches)(each) for each in (x, -x)]
        torch._dynamo.reset()
        kept = te(branches, **STEP)
        for each, y in zip((x, -x, x, -x), expected * 2, strict=True):
            assert_same(kept(each), y)
        te_dynamo.freeze(one, drop_weights=True)
        assert_same(kept(x), expected[0])
    assert not quantized and not any(map(is_dropped, one.parameters()))


class ExpertLoop(nn.Module):
    """Experts on pieces of fixed sizes, as a user writes them."""

    def __init__(self, checkpoints: bool = False) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(32, 48, bias=False) for _ in range(3)])
        self.checkpoints = checkpoints

    def loop(self, x: Tensor) -> Tensor:
        pieces = torch.split(x, [8, 24, 16])
        return torch.cat([expert(piece) for expert, piece in zip(self.experts, pieces, strict=True)])

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.loop, x, use_reentrant=False) if self.checkpoints else self.loop(x)


def rows(dtype: torch.dtype = torch.bfloat16) -> Tensor:
    torch.manual_seed(2)
    return torch.randn(48, 32).to(dtype)


@pytest.mark.one_fast_case
@pytest.mark.parametrize("codegen", CODEGENS)
@pytest.mark.parametrize("checkpoints", [False, True])
def test_a_loops_experts_are_one_workspace(checkpoints: bool, codegen: str, quantized) -> None:
    results = []
    for options in ({}, STEP):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = ExpertLoop(checkpoints).bfloat16()
        with te_dynamo.capture() as graphs:
            results.append(train(model, te(model, codegen=codegen, **options), [rows(), rows() * 2], steps=2))
    for ours, theirs in zip(*results, strict=True):
        assert_same(ours, theirs)
    assert quantized == [(3, 48, 32)] * 2
    (row,) = graphs.reports[0].workspaces
    assert row.weight == "experts.0.weight, experts.1.weight, experts.2.weight"
    for phase in ("forward", "backward"):
        assert "aten.cat([experts" not in graphs[phase] and "aten.stack([experts" not in graphs[phase]


@pytest.mark.parametrize("drop", [pytest.param(False, marks=pytest.mark.slow), True])
def test_frozen_experts_of_a_loop(drop: bool, quantized) -> None:
    torch.manual_seed(0)
    model, x = ExpertLoop().bfloat16(), rows()
    with torch.no_grad():
        expected = te(model)(x)
        torch._dynamo.reset()
        with te_dynamo.capture() as graphs:
            compiled = te(te_dynamo.freeze(model, drop_weights=drop))
            assert_same(compiled(x), expected)
        assert "experts" not in graphs["inference"]
        state = {name: value.clone() for name, value in model.state_dict().items()}
        state["experts.1.weight"] = torch.randn(48, 32).bfloat16()
        model.load_state_dict(state)
        changed = compiled(x)
        assert_same(changed[:8], expected[:8])
        assert not torch.equal(changed[8:32], expected[8:32])
        assert quantized == [(3, 48, 32)] * 2
        te_dynamo.unfreeze(model)
        assert_same(te(model)(x), changed)


def test_one_frozen_expert_beside_others_that_learn() -> None:
    model, x = ExpertLoop().bfloat16(), rows()
    model.experts[0].requires_grad_(False)
    te_dynamo.freeze(model.experts[0])
    for options in ({}, STEP):
        torch._dynamo.reset()
        compiled = te(model, **options)
        for _ in range(2):
            compiled(x).sum().backward()
            with torch.no_grad():
                model.experts[1].weight.mul_(2)
        fresh_copy = copy.deepcopy(model)
        assert_same(compiled(x), te(fresh_copy)(x))
    model.experts[0].requires_grad_(True)
    torch._dynamo.reset()
    with pytest.raises(Exception, match="is frozen for inference and would get a gradient"):
        te(model, **STEP)(x)
