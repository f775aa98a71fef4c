"""The fuser: registration, order, phases, errors that name the fusion. That fusing changes no number: test_fuser_numbers.py."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from helpers.models.snapshot_models import (
    MODELS,
    GeluMLP,
    SwigluMLP,
    capture_inference,
    capture_training,
    compiled_run,
    shape_for,
)
from torch import fx

import te_dynamo
from te_dynamo import (
    fusion_registry,
    register_backward_fusion,
    register_forward_backward_fusion,
    register_forward_fusion,
    unregister_fusion,
)
from te_dynamo.errors import TeError
from te_dynamo.fusion_registry import fusion_key
from te_dynamo.passes.dialect import fuser
from te_dynamo.passes.dialect.fuser import fuse
from te_dynamo.recipe import Float8CurrentScaling

REGISTER = [register_forward_backward_fusion, register_forward_fusion, register_backward_fusion]
PHASES = {
    register_forward_backward_fusion: ["joint"],
    register_forward_fusion: ["forward", "backward", "inference"],
    register_backward_fusion: ["backward", "inference"],  # where a function calls backward itself
}
FAST_FORWARD = Float8CurrentScaling(fprop_fast_accum=True)
gemm = torch.ops.te.gemm.default


@pytest.fixture(autouse=True)
def nothing_stays_registered() -> Iterator[None]:
    yield
    left = [fusion for fusions in fusion_registry._lists() for fusion in fusions]
    for fusion in left:
        unregister_fusion(fusion)
    assert not left


def slow_accumulation(graph: fx.Graph) -> int:
    """A user's fusion: fast accumulation off, wherever it is on."""
    fast = [node for node in graph.nodes if node.target is gemm and node.args[-1]]
    for node in fast:
        node.args = (*node.args[:-1], False)
    return len(fast)


def never(graph: fx.Graph) -> int:
    return 0


def graph_of_nothing() -> fx.Graph:
    graph = fx.Graph()
    graph.output(graph.placeholder("x"))
    return graph


# ---- registration


@pytest.mark.parametrize("register", REGISTER)
def test_with_registers_for_its_body(register: Any) -> None:
    before = fusion_key()
    with register(never) as fusion:
        assert fusion is never and fusion_key() != before
    assert fusion_key() == before


def test_with_unregisters_after_an_exception() -> None:
    before = fusion_key()
    with pytest.raises(ZeroDivisionError), register_forward_fusion(never):
        _ = 1 / 0
    assert fusion_key() == before


def test_decorator_leaves_a_function_that_can_be_unregistered() -> None:
    seen = []

    @register_forward_fusion
    def decorated(graph: fx.Graph) -> int:
        seen.append(graph)
        return 0

    fuse(graph := graph_of_nothing(), "forward")
    assert seen == [graph]
    assert decorated(graph) == 0 and decorated.__name__ == "decorated"
    unregister_fusion(decorated)
    with pytest.raises(ValueError, match=r"decorated is not registered"):
        unregister_fusion(decorated)


def test_registering_twice_is_an_error() -> None:
    with register_forward_fusion(never):
        for register in REGISTER:
            with pytest.raises(ValueError, match=r"never is registered already"):
                register(never)
    with pytest.raises(TypeError, match=r"function of `graph`.*got str"):
        register_forward_fusion("fuse")  # type: ignore[arg-type]


def test_key_tells_fusions_of_one_source_apart() -> None:
    """Two that one factory made, with other numbers in them, must not share compiled code."""

    def make(threshold: int) -> Any:
        def fusion(graph: fx.Graph, default: int = threshold) -> int:
            return 0 * threshold

        return fusion

    keys = set()
    for threshold in (1, 2, 1):
        with register_forward_fusion(make(threshold)):
            keys.add(fusion_key())
    assert len(keys) == 2


# ---- what runs where


def test_shipped_first_then_registered_in_order() -> None:
    order: list[str] = []

    def noting(name: str) -> Any:
        def fusion(graph: fx.Graph) -> int:
            order.append(name)
            assert not any(node.target is torch.ops.te.rms_norm.default for node in graph.nodes)  # shipped ones ran
            return 0

        return fusion

    with register_forward_fusion(noting("first")), register_forward_fusion(noting("second")):
        capture_inference(SwigluMLP, (16, 64), "cpu")
    assert order == ["first", "second"]


@pytest.mark.parametrize("register", REGISTER)
def test_phases(register: Any) -> None:
    """Joint fusions see both halves; forward fusions every divided graph, since backward may recompute a forward."""
    with register(slow_accumulation):
        graphs = [
            capture(GeluMLP, (16, 64), "cpu", recipe=FAST_FORWARD) for capture in (capture_training, capture_inference)
        ]
    fired = [phase for g in graphs for phase, name, _ in g.reports[0].fusions if name == "slow_accumulation"]
    # The recipe asks for fast accumulation in forward only, so it is there that the fusion finds something.
    assert fired == [phase for phase in PHASES[register] if phase != "backward"]


@pytest.mark.parametrize("register", REGISTER)
def test_phases_that_a_fusion_sees(register: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(fuser, "fusion_name", lambda fusion: getattr(fusion, "__name__", ""))
    with register(lambda graph: seen.append(graph) or 0):
        for phase in ("joint", "forward", "backward", "inference"):
            seen.clear()
            fuse(graph := graph_of_nothing(), phase)
            assert seen == ([graph] if phase in PHASES[register] else [])


@pytest.mark.parametrize("model", MODELS.values(), ids=list(MODELS))
def test_fast_sums_are_fused_as_slow_ones(model: type[torch.nn.Module]) -> None:
    fast, slow = (
        capture_training(model, shape_for(model, 32), "cuda", recipe=recipe)
        for recipe in (FAST_FORWARD, Float8CurrentScaling())
    )
    assert "fast_accum=True" in fast["forward"] and "fast_accum=True" not in slow["forward"]
    assert fast["forward"].replace("fast_accum=True", "fast_accum=False") == slow["forward"]
    assert fast["backward"] == slow["backward"]


def test_a_users_fusion_shows_in_explain() -> None:
    model = GeluMLP().bfloat16()
    with register_forward_fusion(slow_accumulation):
        options = {"codegen": "eager", "recipe": FAST_FORWARD}
        explained = te_dynamo.explain(model, torch.randn(16, 64, dtype=torch.bfloat16), options=options)
    rows = {(row["phase"], row["fusion"]): row["count"] for row in explained.to_dict()["fusions"]}
    assert rows["forward", "slow_accumulation"] == 2
    assert rows["forward", "fuse_gemm_bias"] == 2
    assert "slow_accumulation" in str(explained)


@pytest.mark.parametrize("phase", ["joint", "forward", "backward", "inference"])
def test_fusing_twice_changes_nothing(phase: str) -> None:
    capture = capture_inference if phase == "inference" else capture_training
    graphs = capture(SwigluMLP, (16, 64), "cpu")
    graph = graphs.graph(phase)
    before = graphs[phase]
    assert fuse(graph, phase) == []
    assert te_dynamo.testing.graph_text(graph) == before


def test_fusions_off_leaves_every_operation_by_itself() -> None:
    graphs = capture_training(GeluMLP, (16, 64), "cpu", fusions=False)
    assert not graphs.reports[0].fusions
    for name in ("te.layer_norm(", "te.add_bias(", "te.activation("):
        assert name in graphs["forward"]
    for name in ("te.activation_backward(", "te.bias_grad("):
        assert name in graphs["backward"]


# ---- fusions that are wrong


def raising(graph: fx.Graph) -> int:
    raise KeyError("no such node")


def endless(graph: fx.Graph) -> int:
    return 1


def silent(graph: fx.Graph) -> int:
    return None  # type: ignore[return-value]


def corrupting(graph: fx.Graph) -> int:
    """Moves a node in front of what it reads."""
    last = next(node for node in reversed(graph.nodes) if node.op == "call_function")
    next(iter(graph.nodes)).prepend(last)
    return 1


WRONG = {
    raising: "failed: 'no such node'",
    endless: "without coming to an end",
    silent: "must return how often it fired, got None",
    corrupting: "before it has been defined",
}


@pytest.mark.parametrize("fusion", WRONG)
@pytest.mark.parametrize("register", REGISTER)
def test_a_wrong_fusion_is_named_and_can_be_left_out(register: Any, fusion: Any) -> None:
    """The error says which fusion it was and what compiles the model without it; that then does."""
    x = torch.randn(16, 64, dtype=torch.bfloat16)
    registered: AbstractContextManager[Any] = register(fusion)
    with registered:
        with pytest.raises(Exception, match=rf"fusion {fusion.__name__} .*") as caught:
            compiled_run(GeluMLP, {"codegen": "eager"})(x)
        error: Any = caught.value
        error = getattr(error, "inner_exception", error)  # what Dynamo wraps
        assert isinstance(error, TeError)
        assert WRONG[fusion] in str(error)
        assert 'options={"fusions": False}' in str(error)
        assert compiled_run(GeluMLP, {"codegen": "eager", "fusions": False})(x).outputs[0].isfinite().all()
