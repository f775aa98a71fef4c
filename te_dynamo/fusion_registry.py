"""Users' fusions: one registry for those of graphs and those of operations.

    fuse(graph) -> int                     rewrites an FX graph of the dialect, inside the compiler (passes/dialect/fuser.py)
    fuse(ops, *, recipe) -> list           rewrites a list of operations (te_dynamo/operations/fuser.py)

The name of a fusion's first parameter says which it is: `graph` or `ops`. Anything else is a TypeError.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import hashlib
import inspect
import pathlib
import uuid
from collections.abc import Callable
from types import FunctionType, NoneType
from typing import Any

import torch

__all__ = [
    "Fusion",
    "fusion_key",
    "fusion_name",
    "operation_fusions",
    "operation_fusions_digest",
    "register_backward_fusion",
    "register_forward_backward_fusion",
    "register_forward_fusion",
    "registered",
    "unregister_fusion",
]

Fusion = Callable[..., Any]

PHASES = ("joint", "forward", "backward")

_registered: dict[str, dict[str, list[Fusion]]] = {of: {phase: [] for phase in PHASES} for of in ("graph", "ops")}

_digest = ""


class _Itself:
    """A fusion as a key: no other fusion equals it, whether it can be hashed or not."""

    def __init__(self, fusion: Fusion) -> None:
        self.fusion = fusion

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and self.fusion is other.fusion

    def __hash__(self) -> int:
        return id(self.fusion)


class _Registration(contextlib.AbstractContextManager["Fusion"]):
    """What registering gives back: to call, the fusion itself, so that `register_*` decorates; as a context, its scope."""

    def __init__(self, fusion: Fusion) -> None:
        self.fusion = fusion
        functools.update_wrapper(self, fusion)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.fusion(*args, **kwargs)

    def __enter__(self) -> Fusion:
        return self.fusion

    def __exit__(self, *_: object) -> None:
        unregister_fusion(self.fusion)


def register_forward_backward_fusion(fusion: Fusion) -> _Registration:
    """Registers a joint fusion, also as a decorator. Stays until `unregister_fusion`, or until the end of the `with` it opens.

    Its first parameter is called `graph` or `ops`, which says what it fuses. Raises TypeError otherwise, and ValueError if it is
    registered already. Compiled code is cached under its source, with the plain values that it closes over; nothing that is
    compiled with a fusion that is an object, or closes over one, is found in a cache again.
    """
    return _register("joint", fusion)


def register_forward_fusion(fusion: Fusion) -> _Registration:
    """Registers a forward fusion, of `graph` or of `ops`, as `register_forward_backward_fusion` does a joint one."""
    return _register("forward", fusion)


def register_backward_fusion(fusion: Fusion) -> _Registration:
    """Registers a backward fusion, of `graph` or of `ops`, as `register_forward_backward_fusion` does a joint one."""
    return _register("backward", fusion)


def unregister_fusion(fusion: Fusion) -> None:
    """Takes a registered fusion out again. Raises ValueError if it is not registered."""
    fusion = _plain(fusion)
    for fusions in _lists():
        if fusion in fusions:
            fusions.remove(fusion)
            _update_digest()
            return
    raise ValueError(f"fusion {fusion_name(fusion)} is not registered")


def registered(of: str, phase: str) -> tuple[Fusion, ...]:
    """The fusions of "graph" or "ops" in a phase ("joint", "forward", "backward"), in the order of their registration."""
    return tuple(_registered[of][phase])


def fusion_key() -> str:
    """Names and sources of the registered fusions, for the compile cache's key: another one each time where a fusion has a state
    that its source does not show."""
    return "\n".join(_keys("graph") + _keys("ops"))


def operation_fusions() -> tuple[tuple[_Itself, ...], ...]:
    """The registered fusions of operations themselves, by phase: what caches inside a process go by."""
    return tuple(tuple(map(_Itself, fusions)) for fusions in _registered["ops"].values())


def operation_fusions_digest() -> str:
    """One short word for the registered fusions of operations, "" for none: graphs carry it, guards compare it."""
    return _digest


def fusion_name(fusion: Fusion) -> str:
    """The name that errors and reports use."""
    return getattr(fusion, "__qualname__", repr(fusion))


def _register(phase: str, fusion: Fusion) -> _Registration:
    fusion = _plain(fusion)
    of = _fuses(fusion)
    if any(fusion in fusions for fusions in _lists()):
        raise ValueError(f"fusion {fusion_name(fusion)} is registered already; unregister_fusion() it first")
    _registered[of][phase].append(fusion)
    _update_digest()
    return _Registration(fusion)


def _fuses(fusion: Fusion) -> str:
    """What it fuses, "graph" or "ops", by the name of its first parameter."""
    expected = "a fusion is a function of `graph` (an FX graph) or of `ops` (a list of operations), by its first parameter's name"
    if not callable(fusion):
        raise TypeError(f"{expected}; got {type(fusion).__name__}")
    try:
        parameters = list(inspect.signature(fusion).parameters)
    except ValueError:  # a builtin without a signature
        parameters = []
    first = parameters[0] if parameters else None
    if first not in _registered:
        found = f"one of `{first}`" if first else "one without parameters"
        raise TypeError(f"fusion {fusion_name(fusion)}: {expected}; got {found}")
    return first


def _plain(fusion: Fusion) -> Fusion:
    return fusion.fusion if isinstance(fusion, _Registration) else fusion


def _lists() -> list[list[Fusion]]:
    return [fusions for phases in _registered.values() for fusions in phases.values()]


def _update_digest() -> None:
    global _digest
    text = "\n".join(_keys("ops"))
    _digest = hashlib.sha256(text.encode()).hexdigest()[:12] if text else ""


def _keys(of: str) -> list[str]:
    return [f"{phase}:{fusion_name(f)}:{_source(f)}" for phase, fusions in _registered[of].items() for f in fusions]


def _source(fusion: Fusion) -> str:
    """Its text, that of its file (which holds the operation that it makes, and the kernels), and the values it closes over or has as
    defaults: a factory's fusions differ in these alone. A word that nothing else has where these do not tell what it does."""
    if not isinstance(fusion, FunctionType):
        return uuid.uuid4().hex  # an object, whose state may change
    try:
        source = inspect.getsource(fusion)
        cells = [cell.cell_contents for cell in fusion.__closure__ or ()]
    except (OSError, ValueError):  # no source, a cell that is empty still
        return uuid.uuid4().hex
    values = map(_value, (*cells, *(fusion.__defaults__ or ()), *(fusion.__kwdefaults__ or {}).items()))
    return f"{source}{_file_of(fusion)}{list(values)!r}"


def _value(value: Any) -> str:
    """A text that two values share only if they are equal."""
    if isinstance(value, FunctionType):
        return _source(value)
    if isinstance(value, (tuple, list)):
        return f"{type(value).__name__}{[_value(each) for each in value]!r}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return f"{type(value)}{[_value(getattr(value, field.name)) for field in dataclasses.fields(value)]!r}"
    return repr(value) if isinstance(value, _TOLD_BY_REPR) else uuid.uuid4().hex


_TOLD_BY_REPR = (bool, int, float, str, bytes, type, NoneType, enum.Enum, torch.dtype, torch._ops.OpOverload)


def _file_of(fusion: Fusion) -> str:
    """The text of the file that defines it, "" without one (an interactive session)."""
    try:
        return pathlib.Path(inspect.getsourcefile(fusion) or "").read_text()
    except OSError:
        return ""
