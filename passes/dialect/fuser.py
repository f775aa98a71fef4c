"""The fuser of graphs: which fusions run on which graph, in which order.

A fusion is a function of a graph of the dialect: `fuse(graph) -> int` rewrites in place and returns how often it fired.
Three kinds, by what they may assume:

    joint     sees forward and backward in one graph, before they are divided; only the pair of halves must be right.
    forward   sees a forward or inference graph; what it saves must suit the unfused backward
    backward  sees a backward or inference graph; must take what the unfused forward saved

Shipped fusions run first, then those of `te_dynamo.register_graph_fusion` in the order of their registration. Each is run until it
fires no more, so order inside a fusion file does not matter; running the fuser twice changes nothing.
"""

from __future__ import annotations

from torch.fx import Graph

from te_dynamo.errors import FusionError, InvalidOptionError
from te_dynamo.fusion_registry import PHASES, Fusion, Phase, fusion_error, fusion_name, registered
from te_dynamo.passes.dialect import fusions as shipped

_MOST_ROUNDS = 1000

_KINDS: dict[str, tuple[Phase, ...]] = {
    "joint": ("joint",),
    "forward": ("forward",),
    "inference": ("forward", "backward"),  # a function that calls backward itself is one graph without gradient
    "backward": ("forward", "backward"),  # a checkpointed forward is recomputed inside the backward graph
}


def check_choice(choice: bool | tuple[str, ...]) -> None:
    """Raises InvalidOptionError for a name in the option "fusions" that no shipped or registered fusion has."""
    fusions = (*shipped.SHIPPED.values(), *(registered("graph", phase) for phase in PHASES))
    known = {fusion_name(fusion) for each in fusions for fusion in each}
    for name in () if isinstance(choice, bool) else choice:
        if name.removeprefix("-") not in known:
            raise InvalidOptionError.unknown("fusion", name.removeprefix("-"), known)


def _chosen(fusion: Fusion, choice: bool | tuple[str, ...]) -> bool:
    if isinstance(choice, bool):
        return choice
    if any(name.startswith("-") for name in choice):
        return f"-{fusion_name(fusion)}" not in choice
    return fusion_name(fusion) in choice


def fuse(graph: Graph, phase: str, choice: bool | tuple[str, ...] = True) -> list[tuple[str, int]]:
    """Runs the fusions of "joint", "forward", "inference" or "backward" on `graph`; returns (name, times) of those that fired.

    choice: the option "fusions": all, none, those with these names, or all but those whose names follow a "-".
    Raises FusionError, naming the fusion, where one raises, does not end or does not return how often it fired.
    """
    fired = []
    candidates = [(kind, fusion) for kind in _KINDS[phase] for fusion in shipped.SHIPPED[kind]]
    candidates += [(kind, fusion) for kind in _KINDS[phase] for fusion in registered("graph", kind)]
    for kind, fusion in candidates:
        times = _run(fusion, kind, graph) if _chosen(fusion, choice) else 0
        if times:
            fired.append((fusion_name(fusion), times))
    graph.eliminate_dead_code()
    graph.lint()
    return fired


def _run(fusion: Fusion, kind: Phase, graph: Graph) -> int:
    total = 0
    for _ in range(_MOST_ROUNDS):
        try:
            times = fusion(graph)
            if isinstance(times, int) and times:
                graph.lint()
        except Exception as error:
            raise _error(fusion, kind, f"failed: {type(error).__name__}: {error}") from error
        if not isinstance(times, int):
            raise _error(fusion, kind, f"must return how often it fired, got {times!r}")
        if times == 0:
            return total
        total += times
    raise _error(fusion, kind, f"fired {_MOST_ROUNDS} times in a row without coming to an end")


def _error(fusion: Fusion, kind: Phase, problem: str) -> FusionError:
    return fusion_error("graph", kind, fusion, f'{problem}. options={{"fusions": False}} compiles the model without it')
