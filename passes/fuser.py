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
import functools
import inspect
from collections.abc import Callable

from torch.fx import Graph

from te_dynamo.errors import InvalidOptionError, TeError
from te_dynamo.passes import fusions as shipped

__all__ = [
    "Fusion",
    "check_choice",
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


class _Registration(contextlib.AbstractContextManager["Fusion"]):
    """What registering gives back: to call, the fusion itself, so that `register_*` decorates; as a context, its scope."""

    def __init__(self, fusion: Fusion) -> None:
        self.fusion = fusion
        functools.update_wrapper(self, fusion)

    def __call__(self, graph: Graph) -> int:
        return self.fusion(graph)

    def __enter__(self) -> Fusion:
        return self.fusion

    def __exit__(self, *_: object) -> None:
        unregister_fusion(self.fusion)


def _register(phase: str, fusion: Fusion) -> _Registration:
    fusion = _plain(fusion)
    if not callable(fusion):
        raise TypeError(f"a fusion is a function of a graph, got {type(fusion).__name__}")
    if any(fusion in fusions for fusions in _registered.values()):
        raise ValueError(f"fusion {_name(fusion)} is registered already; unregister_fusion() it first")
    _registered[phase].append(fusion)
    return _Registration(fusion)


def register_forward_backward_fusion(fusion: Fusion) -> _Registration:
    """Registers a joint fusion, also as a decorator. Stays until `unregister_fusion`, or until the end of the `with` it opens."""
    return _register("joint", fusion)


def register_forward_fusion(fusion: Fusion) -> _Registration:
    """Registers a forward fusion, also as a decorator. Stays until `unregister_fusion`, or until the end of the `with` it opens."""
    return _register("forward", fusion)


def register_backward_fusion(fusion: Fusion) -> _Registration:
    """Registers a backward fusion, also as a decorator. Stays until `unregister_fusion`, or until the end of the `with` it opens."""
    return _register("backward", fusion)


def unregister_fusion(fusion: Fusion) -> None:
    """Takes a registered fusion out again. Raises ValueError if it is not registered."""
    fusion = _plain(fusion)
    for fusions in _registered.values():
        if fusion in fusions:
            fusions.remove(fusion)
            return
    raise ValueError(f"fusion {_name(fusion)} is not registered")


def _plain(fusion: Fusion) -> Fusion:
    return fusion.fusion if isinstance(fusion, _Registration) else fusion


def fusion_key() -> str:
    """Names and sources of the registered fusions, for the compile cache's key."""
    return "\n".join(f"{phase}:{_name(f)}:{_source(f)}" for phase, fusions in _registered.items() for f in fusions)


def check_choice(choice: bool | tuple[str, ...]) -> None:
    """Raises InvalidOptionError for a name in the option "fusions" that no shipped or registered fusion has."""
    known = {_name(fusion) for fusions in (*shipped.SHIPPED.values(), *_registered.values()) for fusion in fusions}
    for name in () if isinstance(choice, bool) else choice:
        if name.removeprefix("-") not in known:
            raise InvalidOptionError.unknown("fusion", name.removeprefix("-"), known)


def _chosen(fusion: Fusion, choice: bool | tuple[str, ...]) -> bool:
    if isinstance(choice, bool):
        return choice
    if any(name.startswith("-") for name in choice):
        return f"-{_name(fusion)}" not in choice
    return _name(fusion) in choice


def fuse(graph: Graph, phase: str, choice: bool | tuple[str, ...] = True) -> list[tuple[str, int]]:
    """Runs the fusions of "joint", "forward", "inference" or "backward" on `graph`; returns (name, times) of those that fired.

    choice: the option "fusions": all, none, those with these names, or all but those whose names follow a "-".
    """
    fired = []
    kinds = _KINDS[phase]
    for fusion in (*(f for kind in kinds for f in shipped.SHIPPED[kind]), *(f for k in kinds for f in _registered[k])):
        times = _run(fusion, graph) if _chosen(fusion, choice) else 0
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
    return TeError(f'fusion {_name(fusion)} {problem}. options={{"fusions": False}} compiles the model without it')


def _name(fusion: Fusion) -> str:
    return getattr(fusion, "__qualname__", repr(fusion))


def _source(fusion: Fusion) -> str:
    """Its text, and the values it closes over: a factory's fusions differ in these alone."""
    try:
        source = inspect.getsource(fusion)
        cells = [cell.cell_contents for cell in getattr(fusion, "__closure__", None) or ()]
    except (OSError, TypeError, ValueError):  # no source, not a function, a cell that is empty still
        return repr(fusion)
    return f"{source}{cells!r}{getattr(fusion, '__defaults__', None)!r}"
