"""The fuser: which fusions run on which graph, in which order.

A fusion is a function of a graph of the dialect: `fuse(graph) -> int` rewrites in place and returns how often it fired.
Three kinds, by what they may assume:

    joint     sees forward and backward in one graph, before they are divided; only the pair of halves must be right
    forward   sees a forward or inference graph; what it saves must suit the unfused backward
    backward  sees a backward graph; must take what the unfused forward saved

Shipped fusions run first, then registered ones in the order of their registration. Each is run until it fires no more, so
order inside a fusion file does not matter; running the fuser twice changes nothing.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator

from torch.fx import Graph

from te_dynamo.errors import TeError
from te_dynamo.passes import fusions as shipped

__all__ = [
    "Fusion",
    "fuse",
    "fusion_key",
    "register_backward_fusion",
    "register_forward_backward_fusion",
    "register_forward_fusion",
    "unregister_fusion",
]

Fusion = Callable[[Graph], int]

_MOST_ROUNDS = 1000

_KINDS = {
    "joint": ("joint",),
    "forward": ("forward",),
    "inference": ("forward",),
    "backward": ("forward", "backward"),  # a checkpointed forward is recomputed inside the backward graph
}

_registered: dict[str, list[Fusion]] = {"joint": [], "forward": [], "backward": []}


def _register(phase: str, fusion: Fusion) -> contextlib.AbstractContextManager[Fusion]:
    if not callable(fusion):
        raise TypeError(f"a fusion is a function of a graph, got {type(fusion).__name__}")
    if any(fusion in fusions for fusions in _registered.values()):
        raise ValueError(f"fusion {_name(fusion)} is registered already; unregister_fusion() it first")
    _registered[phase].append(fusion)

    @contextlib.contextmanager
    def scope() -> Iterator[Fusion]:
        try:
            yield fusion
        finally:
            unregister_fusion(fusion)

    return scope()


def register_forward_backward_fusion(fusion: Fusion) -> contextlib.AbstractContextManager[Fusion]:
    """Registers a joint fusion. Stays until `unregister_fusion`, or until the end of the `with` it opens."""
    return _register("joint", fusion)


def register_forward_fusion(fusion: Fusion) -> contextlib.AbstractContextManager[Fusion]:
    """Registers a forward fusion. Stays until `unregister_fusion`, or until the end of the `with` it opens."""
    return _register("forward", fusion)


def register_backward_fusion(fusion: Fusion) -> contextlib.AbstractContextManager[Fusion]:
    """Registers a backward fusion. Stays until `unregister_fusion`, or until the end of the `with` it opens."""
    return _register("backward", fusion)


def unregister_fusion(fusion: Fusion) -> None:
    """Takes a registered fusion out again. Raises ValueError if it is not registered."""
    for fusions in _registered.values():
        if fusion in fusions:
            fusions.remove(fusion)
            return
    raise ValueError(f"fusion {_name(fusion)} is not registered")


def fusion_key() -> str:
    """Names and sources of the registered fusions, for the compile cache's key."""
    return "\n".join(f"{phase}:{_name(f)}:{_source(f)}" for phase, fusions in _registered.items() for f in fusions)


def fuse(graph: Graph, phase: str) -> list[tuple[str, int]]:
    """Runs the fusions of "joint", "forward", "inference" or "backward" on `graph`; returns (name, times) of those that fired."""
    fired = []
    kinds = _KINDS[phase]
    for fusion in (*(f for kind in kinds for f in shipped.SHIPPED[kind]), *(f for k in kinds for f in _registered[k])):
        times = _run(fusion, graph)
        if times:
            fired.append((_name(fusion), times))
    graph.eliminate_dead_code()
    graph.lint()
    return fired


def _run(fusion: Fusion, graph: Graph) -> int:
    total = 0
    for _ in range(_MOST_ROUNDS):
        try:
            times = fusion(graph)
        except Exception as error:
            raise TeError(
                f'fusion {_name(fusion)} failed: {error}. options={{"fusions": False}} compiles the model without it'
            ) from error
        if not isinstance(times, int):
            raise TeError(f"fusion {_name(fusion)} must return how often it fired, got {times!r}")
        if times == 0:
            return total
        total += times
    raise TeError(f"fusion {_name(fusion)} fired {_MOST_ROUNDS} times in a row without coming to an end")


def _name(fusion: Fusion) -> str:
    return getattr(fusion, "__qualname__", repr(fusion))


def _source(fusion: Fusion) -> str:
    try:
        return inspect.getsource(fusion)
    except (OSError, TypeError):
        return repr(fusion)
