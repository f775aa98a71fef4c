"""The graphs after each stage of the backend, as text and as graphs.

    with te_dynamo.capture() as graphs:
        torch.compile(model, backend="te")(x).sum().backward()
    print(graphs["backward"])

The backend's side is `GraphInProgress`, `record` and `publish`. They do nothing when nobody captures, and torch neither logs nor traces
(te_dynamo/inspect/logs.py).
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import threading
from collections.abc import Iterator, Mapping

import torch
from torch import fx

from te_dynamo.errors import MissingStageError
from te_dynamo.inspect.graphs.graph_names import name_inputs
from te_dynamo.inspect.graphs.graph_text import graph_text
from te_dynamo.inspect.logs import is_heard, tell_graph
from te_dynamo.report import Report

STAGES = (
    "match",
    "joint",
    "forward",
    "backward",
    "inference",
    "lower.forward",
    "lower.backward",
    "lower.inference",
)
"""In the order in which a graph passes them."""

# Not a ContextVar: autograd compiles a CUDA model's backward graph on a thread that inherits no context.
_captures: list[Captured] = []
_lock = threading.RLock()

_hearing: contextvars.ContextVar[list[Report] | None] = contextvars.ContextVar("te_dynamo_hearing", default=None)
"""Where the reports of this thread's compilations go, beside captures."""


@dataclasses.dataclass(eq=False)
class GraphInProgress:
    """One Dynamo graph on its way through the stages. stages: copies of it after those that were recorded."""

    stages: dict[str, fx.Graph] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        with _lock:
            for captured in _captures:
                captured._number(self)


class Captured(Mapping[str, str]):
    """What one `capture()` saw: a mapping of stages to texts, in the pipeline's order. Filled while the context is open, readable then and after.

        for stage, text in graphs.items():
            print(stage, text, sep="\\n")

    graphs[stage]: the stage's text; with several Dynamo graphs their texts under a header each.
    graphs.all(stage): the texts, one a Dynamo graph. graphs.graph(stage): the graph itself (a copy).
    graphs.before(stage): the graph as the stage found it, before what it fuses.
    graphs.stages: the captured stages in order. graphs.reports: a Report for each Dynamo graph.
    Each raises MissingStageError (a KeyError) for a stage that was not captured, saying why it may be
    missing.
    """

    __hash__ = object.__hash__
    __eq__ = object.__eq__

    def __init__(self) -> None:
        self._graphs: dict[str, dict[int, tuple[str, fx.Graph]]] = {}
        self._before: dict[str, dict[int, fx.Graph]] = {}
        self._reports: dict[int, Report] = {}
        self._order: dict[GraphInProgress, int] = {}

    def __getitem__(self, stage: str) -> str:
        texts = self.all(stage)
        if len(texts) == 1:
            return texts[0]
        numbers = sorted(self._graphs[stage])
        return "\n\n".join(f"# graph {number}\n{text}" for number, text in zip(numbers, texts, strict=True))

    def __iter__(self) -> Iterator[str]:
        return iter(self.stages)

    def __len__(self) -> int:
        return len(self.stages)

    def all(self, stage: str) -> list[str]:
        """The stage's texts in the order of the Dynamo graphs."""
        return [self._stage(stage)[number][0] for number in sorted(self._stage(stage))]

    def graph(self, stage: str, index: int = 0) -> fx.Graph:
        """A copy of the graph as the stage left it; `index` counts the Dynamo graphs that have the stage."""
        graphs = self._stage(stage)
        return graphs[sorted(graphs)[index]][1]

    def before(self, stage: str, index: int = 0) -> fx.Graph | None:
        """A copy of what `graph(stage, index)` was made from; None for lowering, which starts from the stage before."""
        numbers = sorted(self._stage(stage))
        return self._before.get(stage, {}).get(numbers[index])

    @property
    def stages(self) -> list[str]:
        """The names of the captured stages, in the pipeline's order."""
        return [stage for stage in STAGES if stage in self._graphs]

    @property
    def reports(self) -> list[Report]:
        """What was matched, fused, lowered and left, a Report for each Dynamo graph in order."""
        return [self._reports[number] for number in sorted(self._reports)]

    def __str__(self) -> str:
        if not self._graphs:
            return "no graph captured"
        sections = []
        for number in sorted(self._order.values()):
            for stage in self.stages:
                if number in self._graphs[stage]:
                    sections.append(f"# graph {number}, {stage}\n{self._graphs[stage][number][0]}")
        return "\n\n".join(sections)

    def _number(self, progress: GraphInProgress) -> int:
        return self._order.setdefault(progress, max(self._order.values(), default=-1) + 1)

    def _stage(self, stage: str) -> dict[int, tuple[str, fx.Graph]]:
        if stage in self._graphs:
            return self._graphs[stage]
        if stage not in STAGES:
            raise MissingStageError(f"te_dynamo: no stage {stage!r}; the stages are {', '.join(STAGES)}")
        seen = f"captured: {', '.join(self.stages)}" if self._graphs else "nothing was captured"
        raise MissingStageError(f"te_dynamo: stage {stage!r} was not captured ({seen}). {self._why_missing(stage)}")

    def _why_missing(self, stage: str) -> str:
        if not self._graphs:
            return (
                "Compile and call the model inside capture(): what was compiled before is not compiled again "
                "(torch._dynamo.reset() makes it), and only torch.compile(..., backend='te') is recorded."
            )
        if "inference" in self._graphs and stage != "inference":
            return "The graph was compiled for inference: nothing required grad, or grad mode was off."
        if stage.endswith("backward"):
            return "The backward graph is compiled by the first backward(), which must happen inside capture()."
        if stage.endswith("inference"):
            return "The graph was compiled for training: call the model under torch.no_grad()."
        return "The pipeline stopped before it, or codegen='eager' has no such stage."


@contextlib.contextmanager
def capture() -> Iterator[Captured]:
    """Records the graphs of everything that backend "te" compiles while the context is open, on any thread.

    torch's compile caches are off inside, because on a warm start no pass runs; they are restored on exit,
    also after an exception. Contexts nest: each records what is compiled while it is open. A function that is
    compiled already does not compile again inside: create the compiled model inside, or call
    torch._dynamo.reset() first (te_dynamo.explain compiles afresh by itself).
    """
    captured = Captured()
    with _caches_off():
        with _lock:
            _captures.append(captured)
        try:
            yield captured
        finally:
            with _lock:
                # by identity: two captures are never equal, but list.remove would compare
                _captures[:] = [other for other in _captures if other is not captured]


def active() -> bool:
    """Whether anybody captures."""
    return bool(_captures)


def record(stage: str, graph: fx.Graph, progress: GraphInProgress) -> None:
    """Stores `graph` after `stage`, as text and as a copy, and tells the logs. MissingStageError for an unknown stage."""
    if not (_captures or is_heard()):
        return
    if stage not in STAGES:
        raise MissingStageError(f"te_dynamo: no stage {stage!r}; the stages are {', '.join(STAGES)}")
    copy = progress.stages[stage] = _copy_graph(graph)
    name_inputs(copy, stage, progress.stages)
    text = graph_text(copy)
    tell_graph(stage, text)
    with _lock:
        for captured in _captures:
            captured._graphs.setdefault(stage, {})[captured._number(progress)] = (text, copy)


def record_before(stage: str, graph: fx.Graph, progress: GraphInProgress) -> None:
    """Stores a copy of `graph`, which `stage` is about to rewrite."""
    if not _captures:
        return
    copy = _copy_graph(graph)
    name_inputs(copy, stage, progress.stages)
    with _lock:
        for captured in _captures:
            captured._before.setdefault(stage, {})[captured._number(progress)] = copy


def abandon(progress: GraphInProgress) -> None:
    """Forgets a Dynamo graph: Dynamo gives up the attempt and traces the function again."""
    with _lock:
        for captured in _captures:
            number = captured._order.pop(progress, -1)
            captured._reports.pop(number, None)
            for numbered in captured._graphs.values():
                numbered.pop(number, None)
            for before in captured._before.values():
                before.pop(number, None)
            captured._graphs = {stage: numbered for stage, numbered in captured._graphs.items() if numbered}


def publish(report: Report, progress: GraphInProgress) -> None:
    """Stores the report of a Dynamo graph: itself, no copy, so later stages may still write to it."""
    if (heard := _hearing.get()) is not None:
        heard.append(report)
    with _lock:
        for captured in _captures:
            captured._reports[captured._number(progress)] = report


@contextlib.contextmanager
def reports_heard() -> Iterator[list[Report]]:
    """The reports of what is compiled on this thread while the context is open, and nothing else: caches stay on."""
    reports: list[Report] = []
    token = _hearing.set(reports)
    try:
        yield reports
    finally:
        _hearing.reset(token)


@contextlib.contextmanager
def uncached() -> Iterator[None]:
    """Turns torch's compile caches off on this thread while anybody captures; does nothing otherwise.

    For the backend to put around `compile_fx_inner`: from torch 2.13 a config patch holds for one thread,
    and autograd compiles the backward graph on another.
    """
    with _caches_off() if _captures else contextlib.nullcontext():
        yield


def _caches_off() -> contextlib.AbstractContextManager[None]:
    import torch._inductor.config

    return torch._inductor.config.patch(force_disable_caches=True)


def _copy_graph(graph: fx.Graph) -> fx.Graph:
    """A copy whose later life is its own: nodes and their meta, and the bodies of higher-order operations."""
    copy = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        mapping[node] = copy.node_copy(node, lambda old: mapping[old])
        if hasattr(node, "_dynamo_source"):  # what name_inputs reads
            mapping[node]._dynamo_source = node._dynamo_source  # type: ignore[attr-defined]
    owner = graph.owning_module
    if owner is not None and any(node.op in ("get_attr", "call_module") for node in graph.nodes):
        # A plain module: a GraphModule would generate code for a graph that is only looked at.
        holder = torch.nn.Module()
        for name, child in owner.named_children():
            body = getattr(child, "graph", None)
            copied = torch.nn.Module() if isinstance(body, fx.Graph) else child
            if isinstance(body, fx.Graph):
                copied.graph = _copy_graph(body)  # type: ignore[assignment]
            holder.add_module(name, copied)  # type: ignore[arg-type]
        copy.owning_module = holder  # type: ignore[assignment]
    return copy
