"""The fuser of operations: passes, order, mapping back, errors that name the fusion, and that fusing twice changes nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from helpers.models.operation_runs import ForwardPair
from hypothesis import given, settings
from hypothesis import strategies as st

import te_dynamo
from te_dynamo import (
    FusedOperation,
    FusibleOperation,
    OperationFuser,
    Sequential,
    fusion_registry,
    register_backward_fusion,
    register_forward_backward_fusion,
    register_forward_fusion,
    register_graph_fusion,
    unregister_fusion,
)
from te_dynamo.errors import FusionError
from te_dynamo.operations import fuser as fuser_module
from te_dynamo.operations import sliding_window
from te_dynamo.operations.basic import (
    GELU,
    AddExtraInput,
    BasicLinear,
    Bias,
    ConstantScale,
    Identity,
    MakeExtraOutput,
    ReLU,
    Reshape,
    RMSNorm,
    SiLU,
)
from te_dynamo.operations.fuser import Group
from te_dynamo.recipe import Float8CurrentScaling

Ops = list[FusibleOperation]


@pytest.fixture(autouse=True)
def only_the_fusions_of_the_test(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The shipped fusions have tests of their own."""
    monkeypatch.setattr("te_dynamo.operations.fuser.SHIPPED", {"joint": (), "forward": (), "backward": ()})
    fuser_module._fused.cache_clear()
    yield
    for fusion in [fusion for fusions in fusion_registry._lists() for fusion in fusions]:
        unregister_fusion(fusion)
    fuser_module._fused.cache_clear()


class BackwardPair(FusedOperation):
    """Two operations one after another, backward only."""

    def fuser_backward(self, ctxs, grad_output, grad_extra_outputs):  # type: ignore[no-untyped-def]
        grads = []
        for op, ctx in zip(reversed(self.ops), reversed(ctxs), strict=True):
            grad_output, of_params = op.op_backward(ctx, grad_output)
            grads.append(of_params)
        return grad_output, grads[::-1], [()] * len(self.ops)


class JointPair(ForwardPair):
    """Both."""

    fuser_forward_fake = FusedOperation.fuser_forward_fake
    fuser_backward = BackwardPair.fuser_backward


def pairing(cls: type[FusedOperation], *types: type) -> Callable[..., Ops]:
    def fuse_pairs(ops: Ops, *, recipe: Any) -> Ops:
        return sliding_window(ops, types, cls)

    return fuse_pairs


def names(groups: Sequence[Group]) -> list[tuple[str, int]]:
    return [(type(group.op).__name__, group.first) for group in groups]


# ---- passes


def test_without_fusions_every_operation_is_a_group() -> None:
    ops = [BasicLinear(16, 16), Bias(16), GELU()]
    fused = OperationFuser(ops).fuse()
    assert names(fused.forward) == [("BasicLinear", 0), ("Bias", 1), ("GELU", 2)] == names(fused.backward)


def test_a_joint_fused_op_is_one_object_in_both_lists() -> None:
    with register_forward_backward_fusion(pairing(JointPair, Bias, GELU)):
        fused = OperationFuser([BasicLinear(16, 16), Bias(16), GELU(), GELU()]).fuse()
    assert names(fused.forward) == [("BasicLinear", 0), ("JointPair", 1), ("GELU", 3)] == names(fused.backward)
    assert fused.forward[1].op is fused.backward[1].op


def test_forward_and_backward_start_from_the_joint_list() -> None:
    ops = [GELU(), SiLU(), ReLU(), Identity()]
    with (
        register_forward_backward_fusion(pairing(JointPair, GELU, SiLU)),
        register_forward_fusion(pairing(ForwardPair, SiLU, ReLU)),  # too late for it
        register_forward_fusion(pairing(ForwardPair, ReLU, Identity)),
        register_backward_fusion(pairing(BackwardPair, GELU, SiLU)),
    ):
        fused = OperationFuser(ops).fuse()
    assert names(fused.forward) == [("JointPair", 0), ("ForwardPair", 2)]
    assert names(fused.backward) == [("JointPair", 0), ("ReLU", 2), ("Identity", 3)]
    assert [basic for group in fused.forward for basic in group.op.basic_ops] == ops


def test_the_first_registered_has_priority() -> None:
    one, two = pairing(ForwardPair, GELU, SiLU), pairing(ForwardPair, SiLU, ReLU)
    ops = [GELU(), SiLU(), ReLU()]
    with register_forward_fusion(one), register_forward_fusion(two):
        assert names(OperationFuser(ops).fuse().forward) == [("ForwardPair", 0), ("ReLU", 2)]
    with register_forward_fusion(two), register_forward_fusion(one):
        assert names(OperationFuser(ops).fuse().forward) == [("GELU", 0), ("ForwardPair", 1)]


def test_backward_holds_what_needs_a_gradient() -> None:
    ops = [GELU(), SiLU(), ReLU(), Identity()]
    with register_backward_fusion(pairing(BackwardPair, SiLU, ReLU)):
        fuser = OperationFuser(ops)
        assert names(fuser.fuse(0).backward) == [("GELU", 0), ("BackwardPair", 1), ("Identity", 3)]
        assert names(fuser.fuse(1).backward) == [("BackwardPair", 1), ("Identity", 3)]
        assert names(fuser.fuse(2).backward) == [("ReLU", 2), ("Identity", 3)]
        assert names(fuser.fuse(4).backward) == []
    with register_forward_backward_fusion(pairing(JointPair, SiLU, ReLU)):  # a joint op is not divided
        assert names(fuser.fuse(2).backward) == [("JointPair", 1), ("Identity", 3)]


SEEN: list[Any] = []


def watching(ops: Ops, *, recipe: Any) -> Ops:
    SEEN.append(recipe)
    return ops


def test_fused_again_when_fusions_or_recipe_change() -> None:
    SEEN.clear()
    recipes = Float8CurrentScaling(), Float8CurrentScaling(backward_format="e4m3")
    for recipe in (*recipes, *recipes):
        fuser = OperationFuser([BasicLinear(16, 16), GELU()], recipe=recipe)
        assert fuser.fuse() == fuser.fuse()
        with register_forward_fusion(watching):
            fuser.fuse()
            fuser.fuse()
            assert fuser.basic_ops[0].recipe == recipe
    assert list(recipes) == SEEN, "the same recipe again is known already, another one of the same class is not"


def test_the_key_and_the_digest_change_with_the_fusions() -> None:
    assert fusion_registry.operation_fusions_digest() == "" == fusion_registry.fusion_key()
    with register_forward_fusion(pairing(ForwardPair, GELU, SiLU)):
        digest, key = fusion_registry.operation_fusions_digest(), fusion_registry.fusion_key()
        assert digest and "fuse_pairs" in key
    with register_forward_fusion(pairing(ForwardPair, SiLU, GELU)):
        assert fusion_registry.operation_fusions_digest() not in ("", digest)
    assert fusion_registry.operation_fusions_digest() == ""


def test_fusions_of_one_text_are_told_apart() -> None:
    """They differ in a default, or in what a class of one name does."""

    def of(made: Any) -> Any:
        def fuse(ops: Ops, *, recipe: Any, made: Any = made) -> Ops:
            return sliding_window(ops, (GELU, SiLU), made)

        return fuse

    @dataclasses.dataclass
    class Pairs:
        made: Any

        def __call__(self, ops: Ops, *, recipe: Any) -> Ops:
            return sliding_window(ops, (GELU, SiLU), self.made)

    digests = set()
    for fusion, expected in ((of(ForwardPair), 1), (of(lambda window: None), 2), (Pairs(ForwardPair), 1)):
        with register_forward_fusion(fusion):
            digests.add(fusion_registry.operation_fusions_digest())
            assert len(OperationFuser([GELU(), SiLU()]).fuse().forward) == expected
    assert len(digests) == 3


# ---- registration


REGISTER: dict[Any, Callable[..., Any]] = {
    "joint": register_forward_backward_fusion,
    "forward": register_forward_fusion,
    "backward": register_backward_fusion,
}


def graph_fusion(graph: Any) -> int:
    return 0


@pytest.mark.parametrize("phase", REGISTER)
def test_one_registry_for_both_kinds(phase: Any) -> None:
    @REGISTER[phase]
    def fuse_nothing(operations: Ops, *, recipe: Any) -> Ops:  # parameters have the names that their author likes
        return operations

    with register_graph_fusion(graph_fusion, phase=phase):
        assert fusion_registry.registered("graph", phase) == (graph_fusion,)
        assert fusion_registry.registered("ops", phase) == (fuse_nothing.fusion,)
    unregister_fusion(fuse_nothing)
    assert fusion_registry.registered("ops", phase) == ()


@pytest.mark.parametrize("phase", REGISTER)
def test_a_rewrite_of_a_graph_is_refused(phase: Any) -> None:
    instead = rf'If it is a rewrite of a graph, .* te_dynamo\.register_graph_fusion\(graph_fusion, phase="{phase}"\)'
    with pytest.raises(FusionError, match=rf"fusion graph_fusion \(.*{__name__}.py:\d+\) is registered as .*{instead}"):
        REGISTER[phase](graph_fusion)


def test_a_rewrite_of_a_graph_whose_parameters_suit_operations_fails_when_called() -> None:
    def rewrite(graph: Any, **options: Any) -> int:
        return len(graph.nodes)

    instead = r'If it is a rewrite of a graph, .* te_dynamo\.register_graph_fusion\(.*rewrite, phase="backward"\)'
    with (
        register_backward_fusion(rewrite),
        pytest.raises(FusionError, match=rf"rewrite \(.*{__name__}.py:\d+\) failed: AttributeError: .*{instead}"),
    ):
        OperationFuser([GELU()]).fuse()


@pytest.mark.parametrize(("fusion", "found"), [(lambda: 0, "its parameters do not allow that$"), (3, "got int")])
def test_what_is_neither_kind_is_refused(fusion: Any, found: str) -> None:
    with pytest.raises(FusionError, match=rf"a fusion of operations, which is called with .*{found}"):
        register_forward_fusion(fusion)


# ---- fusions that are wrong


def dropping(ops: Ops, *, recipe: Any) -> Ops:
    return ops[1:]


def dropping_an_output(ops: Ops, *, recipe: Any) -> Ops:
    return [op for op in ops if not isinstance(op, MakeExtraOutput)]


def adding(ops: Ops, *, recipe: Any) -> Ops:
    return [*ops, Identity()]


def reordering(ops: Ops, *, recipe: Any) -> Ops:
    return ops[::-1]


def rebuilding(ops: Ops, *, recipe: Any) -> Ops:
    return [GELU() if op == GELU() else op for op in ops]


def wrapping(ops: Ops, *, recipe: Any) -> Ops:
    return [ForwardPair((ForwardPair((ops[0],)), ops[1])), *ops[2:]]  # type: ignore[arg-type]


def raising(ops: Ops, *, recipe: Any) -> Ops:
    return ops[100:101] or [ops[100]]


def of_nothing(ops: Ops, *, recipe: Any) -> Ops:
    return [ForwardPair(()), *ops]


def returning_none(ops: Ops, *, recipe: Any) -> Any:
    return None


def backward_in_forward(ops: Ops, *, recipe: Any) -> Ops:
    return sliding_window(ops, (GELU, SiLU), BackwardPair)


WRONG: dict[Callable[..., Any], str] = {
    dropping: r"returned 2 basic operations for 3",
    dropping_an_output: r"dropped MakeExtraOutput\(\), and with it an extra output",
    adding: r"returned 4 basic operations for 3",
    reordering: r"put MakeExtraOutput\(\) where GELU\(\) was \(basic operation 0\)",
    rebuilding: r"put GELU\(\) where GELU\(\) was \(basic operation 0\): fused operations hold the operations that they were given",
    wrapping: r"failed: TypeError: ForwardPair: a fused operation is made of basic ones",
    raising: r"failed: IndexError",
    of_nothing: r"failed: TypeError: ForwardPair: a fused operation of no operations",
    returning_none: r"must return a list of operations, got None",
    backward_in_forward: r"made BackwardPair, which has no forward, in the forward pass",
}


@pytest.mark.parametrize("fusion", WRONG)
def test_a_wrong_fusion_is_named_and_can_be_left_out(fusion: Any) -> None:
    ops = [GELU(), SiLU(), MakeExtraOutput()]
    x = torch.randn(4)
    with register_forward_fusion(fusion):
        with pytest.raises(FusionError, match=rf"fusion {fusion.__name__} \(.*\) {WRONG[fusion]}.*fusions=False"):
            Sequential(*ops)(x)
        assert torch.equal(
            Sequential(*ops, fusions=False)(x)[0],
            Sequential(SiLU(), fusions=False)(Sequential(GELU(), fusions=False)(x)),
        )


def test_a_fusion_may_not_take_a_fused_op_apart() -> None:
    def greedy(ops: Ops, *, recipe: Any) -> Ops:
        return [ForwardPair(tuple(basic for op in ops for basic in op.basic_ops))]

    with (
        register_forward_backward_fusion(pairing(JointPair, GELU, SiLU)),
        register_forward_fusion(greedy),
        pytest.raises(FusionError, match=r"greedy \(.*\) took JointPair\(.*\) apart, which an earlier fusion made"),
    ):
        OperationFuser([GELU(), SiLU(), ReLU()]).fuse()


def test_a_joint_fusion_needs_both_halves() -> None:
    with (
        register_forward_backward_fusion(pairing(ForwardPair, GELU, SiLU)),
        pytest.raises(
            FusionError, match=r"fuse_pairs \(.*\) made ForwardPair, which has no backward, in the joint pass"
        ),
    ):
        OperationFuser([GELU(), SiLU()]).fuse()


# ---- the sliding window


def test_sliding_window() -> None:
    ops: Ops = [GELU(), GELU(), GELU(), SiLU(), GELU()]
    windows: list[Any] = []

    def keep(window: Any) -> None:
        windows.append(window)

    assert sliding_window(ops, (GELU, GELU), keep) == ops
    assert windows == [tuple(ops[0:2]), tuple(ops[1:3])]
    fused = sliding_window(ops, (GELU, GELU), ForwardPair)
    assert [len(op.basic_ops) for op in fused] == [2, 1, 1, 1]
    assert sliding_window(ops[:1], (GELU, GELU), ForwardPair) == ops[:1] and sliding_window([], (GELU,), keep) == []
    assert len(sliding_window(ops, (GELU, (SiLU, ReLU)), ForwardPair)) == 4


# ---- any list


BASIC = [
    BasicLinear(16, 16),
    Bias(16),
    GELU(),
    SiLU(),
    ReLU(),
    RMSNorm(16),
    AddExtraInput(),
    MakeExtraOutput(),
    ConstantScale(2.0),
    Identity(),
    Reshape((-1, 16)),
]
PAIRS = [(BasicLinear, Bias), (Bias, GELU), (BasicLinear, Bias, GELU), (RMSNorm, BasicLinear), (GELU, GELU), (SiLU,)]


@settings(max_examples=300, deadline=None)
@given(
    ops=st.lists(st.sampled_from(BASIC), max_size=12),
    fusions=st.lists(st.tuples(st.sampled_from(["joint", "forward", "backward"]), st.sampled_from(PAIRS)), max_size=4),
    shipped=st.booleans(),
    first_backward=st.integers(0, 12),
)
def test_any_list_fuses_and_maps_back(ops: Ops, fusions: Any, shipped: bool, first_backward: int) -> None:
    classes = {"joint": JointPair, "forward": ForwardPair, "backward": BackwardPair}
    table: dict[str, tuple[Any, ...]] = {phase: SHIPPED[phase] if shipped else () for phase in classes}
    for phase, types in fusions:
        table[phase] += (pairing(classes[phase], *types),)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("te_dynamo.operations.fuser.SHIPPED", table)
        first_backward = min(first_backward, len(ops))
        fused = fuser_module._fused.__wrapped__(tuple(ops), None, first_backward, "")
        again = fuser_module._pass("forward", [group.op for group in fused.forward], None)
    assert all(a is group.op for a, group in zip(again, fused.forward, strict=True)), "fusing twice changes the list"
    assert_maps_back(fused.forward, ops, 0)
    assert_maps_back(fused.backward, ops, first_backward)


SHIPPED = te_dynamo.operations.fused.SHIPPED


def assert_maps_back(groups: Sequence[Group], ops: Ops, first: int) -> None:
    """The groups stand for the operations in order, by identity, from `first` on at the latest."""
    start = groups[0].first if groups else len(ops)
    assert start <= first and all(group.op.basic_ops for group in groups)
    flat = [(index, basic) for group in groups for index, basic in zip(group.indices, group.op.basic_ops, strict=True)]
    assert [index for index, _ in flat] == list(range(start, len(ops)))
    assert all(basic is ops[index] for index, basic in flat)
