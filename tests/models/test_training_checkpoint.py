"""Activation checkpointing around and inside a compiled model, whole and selective."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import Any

import pytest
import torch
from helpers.models.checkpointed import Checkpointed, selective
from helpers.models.small_models import GeluMLP, QuickGeluMLP, Residual, SquaredReluMLP
from helpers.models.training import CODEGENS, assert_close, block, gradients, te, tokens
from helpers.slow import slow_but
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import te_dynamo

aten = torch.ops.aten
LINEARS = 7
"""Of `block`: q, k, v, o; gate, up, down."""


@pytest.mark.parametrize("codegen", CODEGENS)
def test_a_checkpoint_changes_no_bit(codegen: str) -> None:
    model = block()
    expected = gradients(te(model, codegen=codegen), model, tokens())
    with te_dynamo.capture() as graphs:
        actual = gradients(te(Checkpointed(model), codegen=codegen), model, tokens())
    assert_close(actual, expected, 0.0)
    assert recomputed(graphs) == 6, "all of the forward's GEMMs but the last, which nothing in backward reads"


def recomputed(graphs: Any, linears: int = LINEARS) -> int:
    """GEMMs in backward beside each linear's two."""
    return graphs["backward"].count("te.gemm(") - 2 * linears


class BesideDetached(nn.Module):
    """A checkpointed piece, and one of the same input that learns nothing."""

    def __init__(self, before: Callable[[Tensor], Tensor], *, norm: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(32, 48), nn.Linear(32, 48)
        self.norm = nn.RMSNorm(32) if norm else nn.Identity()
        self.before, self.first, self.checkpointed = before, True, True

    def forward(self, x: Tensor) -> Tensor:
        def piece(x: Tensor) -> Tensor:
            return self.b(self.norm(self.before(x)))

        ours = [] if self.first else [self.a(self.norm(self.before(x))).detach()]
        y = checkpoint(piece, x, use_reentrant=False) if self.checkpointed else piece(x)
        ours = ours or [self.a(self.norm(self.before(x))).detach()]
        return y + ours[0]


@pytest.mark.one_fast_case
@pytest.mark.parametrize("codegen", CODEGENS)
@pytest.mark.parametrize("first", slow_but(1, [True, False]), ids=["checkpoint first", "checkpoint last"])
@pytest.mark.parametrize(
    ("before", "norm"),
    [(nn.Identity(), False), (nn.GELU(), False), (torch.sin, False), (nn.Identity(), True)],
    ids=["linear", "gelu", "sin", "norm"],
)
def test_a_checkpoint_beside_what_reads_the_same_tensor(codegen: str, first: bool, before: Any, norm: bool) -> None:
    model, x = BesideDetached(before, norm=norm), torch.randn(16, 32, requires_grad=True)
    learning = nn.ModuleList([model.b, model.norm])
    model.first, model.checkpointed = first, False
    expected = gradients(te(model, codegen=codegen), learning, x)
    model.checkpointed = True
    assert_close(gradients(te(model, codegen=codegen), learning, x), expected, 0.0 if codegen == "eager" else 1e-6)


@pytest.mark.slow
def test_a_reentrant_checkpoint_inside_is_traced_as_the_other() -> None:
    model, x = block(), tokens().requires_grad_()
    expected = gradients(te(model), model, x)
    with te_dynamo.capture() as graphs:
        actual = gradients(te(Checkpointed(model, use_reentrant=True)), model, x)
    assert_close(actual, expected, 0.0)
    assert len(graphs.reports) == 1 and recomputed(graphs) == 6


@pytest.mark.slow
def test_a_checkpoint_around_a_compiled_model() -> None:
    """What compiling saves for backward on fake tensors must not be counted: it happens in the forward only."""
    model = block()
    expected = gradients(te(model), model, tokens())
    for reentrant in (False, True):
        compiled = te(model)
        x = tokens().requires_grad_()
        actual = gradients(lambda x: checkpoint(compiled, x, use_reentrant=reentrant), model, x)  # noqa: B023
        assert_close(actual, expected, 0.0)


def saved(graphs: Any) -> dict[str, int]:
    """How many tensors of each dtype go from forward to backward, weights, x and random states left out."""
    counts: dict[str, int] = {}
    for node in graphs.graph("backward").find_nodes(op="placeholder"):
        if not node.name.startswith(("primals", "tangents", "fwd_rng")):
            name = str(node.meta["val"].dtype).removeprefix("torch.")
            counts[name] = counts.get(name, 0) + 1
    return counts


@pytest.mark.parametrize(
    "listed",
    [[aten.mm.default], pytest.param([aten.linear.default, aten.mm.default], marks=pytest.mark.slow)],
    ids=["mm", "linear"],
)
def test_a_policy_that_saves_products_saves_ours(listed: Collection[Any]) -> None:
    """The products, in bf16, and not their operands: those are quantized again."""
    model = block()
    expected = gradients(te(model), model, tokens())
    with te_dynamo.capture() as graphs:
        actual = gradients(te(Checkpointed(model, context_fn=selective(list(listed)))), model, tokens())
    assert_close(actual, expected, 0.0)
    assert recomputed(graphs) == 0
    assert saved(graphs)["bfloat16"] == LINEARS - 1 and "float8_e4m3fn" not in saved(graphs)


@pytest.mark.slow
def test_a_policy_that_saves_products_saves_ours_in_inductors_code() -> None:
    model = block()
    expected = gradients(te(model, codegen="inductor"), model, tokens())
    policy = selective([aten.mm.default])
    actual = gradients(te(Checkpointed(model, context_fn=policy), codegen="inductor"), model, tokens())
    assert_close(actual, expected, 0.0)


@pytest.mark.slow
def test_a_policy_that_lists_nothing_of_ours_changes_nothing() -> None:
    model = block()
    with te_dynamo.capture() as graphs:
        gradients(te(Checkpointed(model, context_fn=selective([aten.bmm.default]))), model, tokens())
    assert recomputed(graphs) == 6 and "bfloat16" not in saved(graphs)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mlp", "activation"),
    [(GeluMLP, aten.gelu.default), (QuickGeluMLP, aten.mul.Tensor), (SquaredReluMLP, aten.pow.Tensor_Scalar)],
    ids=["gelu", "quick_gelu", "relu2"],
)
def test_a_policy_that_saves_biased_products_and_activations(mlp: type[nn.Module], activation: Any) -> None:
    model = Residual(mlp()).bfloat16()
    expected = gradients(te(model), model, tokens())
    policy = selective([aten.addmm.default, activation])
    with te_dynamo.capture() as graphs:
        actual = gradients(te(Checkpointed(model, context_fn=policy)), model, tokens())
    assert_close(actual, expected, 0.0)
    assert recomputed(graphs, linears=2) == 0 and "te.activation(" not in graphs["backward"]


@pytest.mark.slow
def test_a_policy_that_saves_products_by_weights_stored_transposed() -> None:
    class Products(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Parameter(torch.randn(32, 64)), nn.Parameter(torch.randn(64, 32))
            self.bias = nn.Parameter(torch.randn(32))

        def forward(self, x: Tensor) -> Tensor:
            return torch.addmm(self.bias, (x @ self.up).sin().flatten(0, 1), self.down).view(x.shape)

    model, x = Products().bfloat16(), tokens().requires_grad_()
    expected = gradients(te(model), model, x)
    with te_dynamo.capture() as graphs:
        policy = selective([aten.mm.default, aten.addmm.default])
        actual = gradients(te(Checkpointed(model, context_fn=policy)), model, x)
    assert_close(actual, expected, 0.0)
    assert recomputed(graphs, linears=2) == 0


@pytest.mark.slow
def test_a_policy_sees_the_arguments_of_what_was_replaced() -> None:
    """As torchtitan's do: every second product is saved, and those by a weight of some shape never are."""
    passes: list[list[tuple[tuple[int, ...], ...]]] = []

    def policy(seen: list[Any], context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op is not aten.mm.default or context.is_recompute:
            return CheckpointPolicy.PREFER_RECOMPUTE
        seen.append(tuple(tuple(arg.shape) for arg in args))
        saves = len(seen) % 2 and args[1].shape != (32, 64)
        return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE

    def contexts() -> Any:  # once for each pass over the region
        passes.append([])
        return create_selective_checkpoint_contexts(functools.partial(policy, passes[-1]))

    model, x = block(), tokens(8)
    expected = gradients(te(model), model, x)
    with te_dynamo.capture() as graphs:
        actual = gradients(te(Checkpointed(model, context_fn=contexts)), model, x)
    assert_close(actual, expected, 0.0)
    for seen in passes:
        assert seen == [((16, 32), (32, 32))] * 4 + [((16, 32), (32, 64))] * 2 + [((16, 64), (64, 32))]
    assert saved(graphs)["bfloat16"] == 2, "of q, k, v, o, gate, up, down: q and v"
