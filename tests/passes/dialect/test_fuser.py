"""The fuser: registration, order, phases, errors that name the fusion. That fusing changes no number: test_fuser_numbers.py."""

from __future__ import annotations

import functools
from collections.abc import Iterator
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
from helpers.slow import slow_but
from torch import fx

import te_dynamo
from te_dynamo import (
    fusion_registry,
    register_graph_fusion,
    unregister_fusion,
)
from te_dynamo.errors import FusionError, InvalidOptionError
from te_dynamo.fusion_registry import fusion_key
from te_dynamo.inspect.graphs.capture import Captured
from te_dynamo.passes.dialect import fuser
from te_dynamo.passes.dialect.fuser import fuse
from te_dynamo.recipe import Float8CurrentScaling

PHASES = {
    "joint": ["joint"],
    "forward": ["forward", "backward", "inference"],
    "backward": ["backward", "inference"],  # where a function calls backward itself
}
register_forward = functools.partial(register_graph_fusion, phase="forward")
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
    fast = [node for node in graph.nodes if node.target is gemm and node.args[5]]
    for node in fast:
        node.args = (*node.args[:5], False, *node.args[6:])
    return len(fast)


def never(graph: fx.Graph) -> int:
    return 0


def graph_of_nothing() -> fx.Graph:
    graph = fx.Graph()
    graph.output(graph.placeholder("x"))
    return graph


# ---- registration


@pytest.mark.parametrize("phase", PHASES)
def test_with_registers_for_its_body(phase: Any) -> None:
    before = fusion_key()
    with register_graph_fusion(never, phase=phase) as fusion:
        assert fusion is never and fusion_key() != before
    assert fusion_key() == before


def test_with_unregisters_after_an_exception() -> None:
    before = fusion_key()
    with pytest.raises(ZeroDivisionError), register_forward(never):
        _ = 1 / 0
    assert fusion_key() == before


def test_decorator_leaves_a_function_that_can_be_unregistered() -> None:
    seen = []

    @register_forward
    def decorated(graph: fx.Graph) -> int:
        seen.append(graph)
        return 0

    fuse(graph := graph_of_nothing(), "forward")
    assert seen == [graph]
    assert decorated(graph) == 0 and decorated.__name__ == "decorated"
    unregister_fusion(decorated)
    with pytest.raises(FusionError, match=r"decorated \(.*\) is not registered"):
        unregister_fusion(decorated)


def test_registering_twice_is_an_error() -> None:
    with register_forward(never):
        for phase in fusion_registry.PHASES:
            with pytest.raises(FusionError, match=r"never \(.*test_fuser.py:\d+\) is registered already"):
                register_graph_fusion(never, phase=phase)
    with pytest.raises(FusionError, match=r"expected a rewrite of a graph.*got str"):
        register_forward("fuse")  # type: ignore[arg-type]


def test_an_unknown_phase_is_an_error_with_the_nearest() -> None:
    with pytest.raises(InvalidOptionError, match=r"unknown phase 'backwards'; did you mean 'backward'\?"):
        register_graph_fusion(never, phase="backwards")  # type: ignore[arg-type]
    with pytest.raises(InvalidOptionError, match=r"unknown phase 'lower'; valid: 'backward', 'forward', 'joint'"):
        register_graph_fusion(never, phase="lower")  # type: ignore[arg-type]


def test_a_fusion_of_operations_is_refused() -> None:
    def fuse_pairs(ops: Any, *, recipe: Any) -> Any:
        return ops

    for phase, siblings in (("joint", "forward_backward"), ("forward", "forward"), ("backward", "backward")):
        instead = rf"If it is a fusion of operations, .* te_dynamo\.register_{siblings}_fusion\(.*fuse_pairs\)"
        with pytest.raises(FusionError, match=rf"fuse_pairs \(.*test_fuser.py:\d+\) is registered as .*{instead}"):
            register_graph_fusion(fuse_pairs, phase=phase)  # type: ignore[arg-type]


@pytest.mark.parametrize("fusion", [lambda ops, recipe=None: ops, lambda *args, **kwargs: len(args[0])])
def test_a_fusion_of_operations_whose_parameters_suit_a_graph_fails_when_called(fusion: Any) -> None:
    instead = r"If it is a fusion of operations, .* te_dynamo\.register_forward_fusion\(<lambda>\)"
    fusion.__qualname__ = "<lambda>"
    with (
        register_forward(fusion),
        pytest.raises(FusionError, match=rf"fusion <lambda> \(.*test_fuser.py:\d+\) (must return|failed).*{instead}"),
    ):
        fuse(graph_of_nothing(), "forward")


def test_key_tells_fusions_of_one_source_apart() -> None:
    """Two that one factory made, with other numbers in them, must not share compiled code."""

    def make(threshold: int) -> Any:
        def fusion(graph: fx.Graph, default: int = threshold) -> int:
            return 0 * threshold

        return fusion

    keys = set()
    for threshold in (1, 2, 1):
        with register_forward(make(threshold)):
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

    with register_forward(noting("first")), register_forward(noting("second")):
        capture_inference(SwigluMLP, (16, 64), "cpu")
    assert order == ["first", "second"]


@pytest.mark.one_fast_case
@pytest.mark.parametrize("registered", PHASES)
def test_phases(registered: Any) -> None:
    """Joint fusions see both halves; forward fusions every divided graph, since backward may recompute a forward."""
    with register_graph_fusion(slow_accumulation, phase=registered):
        graphs = [
            capture(GeluMLP, (16, 64), "cpu", recipe=FAST_FORWARD) for capture in (capture_training, capture_inference)
        ]
    fired = [phase for g in graphs for phase, name, _ in g.reports[0].fusions if name == "slow_accumulation"]
    # The recipe asks for fast accumulation in forward only, so it is there that the fusion finds something.
    assert fired == [phase for phase in PHASES[registered] if phase != "backward"]


@pytest.mark.parametrize("registered", PHASES)
def test_phases_that_a_fusion_sees(registered: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(fuser, "fusion_name", lambda fusion: getattr(fusion, "__name__", ""))
    with register_graph_fusion(lambda graph: seen.append(graph) or 0, phase=registered):
        for phase in ("joint", "forward", "backward", "inference"):
            seen.clear()
            fuse(graph := graph_of_nothing(), phase)
            assert seen == ([graph] if phase in PHASES[registered] else [])


@pytest.mark.one_fast_case
@pytest.mark.parametrize("model", slow_but(2, MODELS.values()), ids=list(MODELS))
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
    with register_forward(slow_accumulation):
        options = {"codegen": "eager", "recipe": FAST_FORWARD}
        explained = te_dynamo.explain(model, torch.randn(16, 64, dtype=torch.bfloat16), options=options)
    rows = {(row["phase"], row["fusion"]): row["count"] for row in explained.to_dict()["fusions"]}
    assert rows["forward", "slow_accumulation"] == 2
    assert rows["forward", "fuse_gemm_bias"] == 2
    assert "slow_accumulation" in str(explained)


@functools.cache
def captured(training: bool) -> Captured:
    return (capture_training if training else capture_inference)(SwigluMLP, (16, 64), "cpu")


@pytest.mark.parametrize("phase", ["joint", "forward", "backward", "inference"])
def test_fusing_twice_changes_nothing(phase: str) -> None:
    graphs = captured(training=phase != "inference")
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
    raising: "failed: KeyError: 'no such node'",
    endless: "without coming to an end",
    silent: "must return how often it fired, got None",
    corrupting: "before it has been defined",
}


@pytest.mark.one_fast_case
@pytest.mark.parametrize("fusion", slow_but(3, WRONG))
@pytest.mark.parametrize("phase", PHASES)
def test_a_wrong_fusion_is_named_and_can_be_left_out(phase: Any, fusion: Any) -> None:
    """The error says which fusion it was and what compiles the model without it; that then does."""
    x = torch.randn(16, 64, dtype=torch.bfloat16)
    with register_graph_fusion(fusion, phase=phase):
        with pytest.raises(Exception, match=rf"fusion {fusion.__name__} .*") as caught:
            compiled_run(GeluMLP, {"codegen": "eager"})(x)
        error: Any = caught.value
        error = getattr(error, "inner_exception", error)  # what Dynamo wraps
        assert isinstance(error, FusionError)
        assert WRONG[fusion] in str(error)
        assert 'options={"fusions": False}' in str(error)
        assert compiled_run(GeluMLP, {"codegen": "eager", "fusions": False})(x).outputs[0].isfinite().all()
