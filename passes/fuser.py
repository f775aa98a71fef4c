"""The fuser of graphs: which fusions run on which graph, in which order.

A fusion is a function of a graph of the dialect: `fuse(graph) -> int` rewrites in place and returns how often it fired.
Three kinds, by what they may assume:

    joint     sees forward and backward in one graph, before they are divided; only the pair of halves must be right.
    forward   sees a forward or inference graph; what it saves must suit the unfused backward
    backward  sees a backward graph; must take what the unfused forward saved

Shipped fusions run first, then registered ones in the order of their registration. Each is run until it fires no more, so
order inside a fusion file does not matter; running the fuser twice changes nothing.
"""

from __future__ import annotations

from torch.fx import Graph

from te_dynamo.errors import TeError
from te_dynamo.fusion_registry import Fusion, fusion_name, registered
from te_dynamo.passes import fusions as shipped

__all__ = ["fuse"]

_MOST_ROUNDS = 1000

_KINDS = {
    "joint": ("joint",),
    "forward": ("forward",),
    "inference": ("forward",),
    "backward": ("forward", "backward"),  # a checkpointed forward is recomputed inside the backward graph
}


def fuse(graph: Graph, phase: str) -> list[tuple[str, int]]:
    """Runs the fusions of "joint", "forward", "inference" or "backward" on `graph`; returns (name, times) of those that fired."""
    fired = []
    kinds = _KINDS[phase]
    for fusion in (
        *(f for kind in kinds for f in shipped.SHIPPED[kind]),
        *(f for kind in kinds for f in registered("graph", kind)),
    ):
        times = _run(fusion, graph)
        if times:
            fired.append((fusion_name(fusion), times))
    graph.eliminate_dead_code()
    graph.lint()
    return fired


def _run(fusion: Fusion, graph: Graph) -> int:
    total = 0
    for _ in range(_MOST_ROUNDS):
        try:
            times = fusion(graph)
            if times:
                graph.lint()
        except Exception as error:
            raise _error(fusion, f"failed: {error}") from error
        if not isinstance(times, int):
            raise _error(fusion, f"must return how often it fired, got {times!r}")
        if times == 0:
            return total
        total += times
    raise _error(fusion, f"fired {_MOST_ROUNDS} times in a row without coming to an end")


def _error(fusion: Fusion, problem: str) -> TeError:
    return TeError(
        f'fusion {fusion_name(fusion)} {problem}. options={{"fusions": False}} compiles the model without it'
    )
