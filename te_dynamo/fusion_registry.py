"""Users' fusions: one registry for fusions of operations and rewrites of graphs.

fuse(ops, *, recipe) -> list     rewrites a list of operations (te_dynamo/operations/fuser.py):
                                 register_forward_backward_fusion, register_forward_fusion, register_backward_fusion
rewrite(graph) -> int            rewrites an FX graph of the dialect, inside the compiler (passes/dialect/fuser.py):
                                 register_graph_fusion
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
from typing import Any, Literal, get_args

import torch

from te_dynamo.errors import FusionError, InvalidOptionError

Fusion = Callable[..., Any]

Kind = Literal["graph", "ops"]

Phase = Literal["joint", "forward", "backward"]

PHASES: tuple[Phase, ...] = get_args(Phase)

_registered: dict[Kind, dict[Phase, list[Fusion]]] = {of: {phase: [] for phase in PHASES} for of in get_args(Kind)}

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
    """Registers a joint fusion of operations, `fuse(ops, *, recipe) -> list`, also as a decorator.

    It stays until `unregister_fusion`, or until the end of the `with` that the registration opens. Raises FusionError where it cannot
    be called so, or is registered already. Compiled code is cached under its source, with the plain values that it closes over;
    nothing that is compiled with a fusion that is an object, or closes over one, is found in a cache again.
    """
    return _register("ops", "joint", fusion)


def register_forward_fusion(fusion: Fusion) -> _Registration:
    """Registers a forward fusion of operations, as `register_forward_backward_fusion` does a joint one."""
    return _register("ops", "forward", fusion)


def register_backward_fusion(fusion: Fusion) -> _Registration:
    """Registers a backward fusion of operations, as `register_forward_backward_fusion` does a joint one."""
    return _register("ops", "backward", fusion)


def register_graph_fusion(fusion: Fusion, *, phase: Phase) -> _Registration:
    """Registers a rewrite of graphs, `rewrite(graph) -> int`, which changes an FX graph of the dialect and returns how often it fired.

    phase: "joint" for the graph before it is divided, "forward" or "backward" for its halves (passes/dialect/fuser.py says what
    each may assume). It stays, and is cached, as a fusion of `register_forward_backward_fusion` is. Raises InvalidOptionError for
    another phase, and FusionError where it cannot be called with a graph alone, or is registered already.
    """
    if phase not in PHASES:
        raise InvalidOptionError.unknown("phase", phase, PHASES)
    return _register("graph", phase, fusion)


def unregister_fusion(fusion: Fusion) -> None:
    """Takes a registered fusion out again. Raises FusionError if it is not registered."""
    fusion = _plain(fusion)
    for fusions in _lists():
        if fusion in fusions:
            fusions.remove(fusion)
            _update_digest()
            return
    raise FusionError(f"fusion {_described(fusion)} is not registered")


def registered(of: Kind, phase: Phase) -> tuple[Fusion, ...]:
    """The fusions of graphs or operations in a phase, in the order of their registration."""
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


def fusion_error(of: Kind, phase: Phase, fusion: Fusion, problem: str) -> FusionError:
    """An error that names the fusion with its file and line; of one that may be of the other kind, what registers that."""
    other: Kind = "ops" if of == "graph" else "graph"
    hint = ""
    if _takes(other, fusion):
        hint = f". If it is {_CALLED[other]}, register it by {_registering(other, phase, fusion)}"
    return FusionError(f"fusion {_described(fusion)} {problem}{hint}")


_CALLED: dict[Kind, str] = {
    "graph": "a rewrite of a graph, which is called with the graph alone",
    "ops": "a fusion of operations, which is called with a list of operations and recipe=...",
}


def _register(of: Kind, phase: Phase, fusion: Fusion) -> _Registration:
    if not callable(fusion):
        raise FusionError(f"expected {_CALLED[of]}; got {type(fusion).__name__}")
    fusion = _plain(fusion)
    if not _takes(of, fusion):
        raise fusion_error(of, phase, fusion, f"is registered as {_CALLED[of]}: its parameters do not allow that")
    if any(fusion in fusions for fusions in _lists()):
        raise FusionError(f"fusion {_described(fusion)} is registered already; unregister_fusion() it first")
    _registered[of][phase].append(fusion)
    _update_digest()
    return _Registration(fusion)


def _takes(of: Kind, fusion: Fusion) -> bool:
    """Whether it can be called as fusions of that kind are."""
    try:
        signature = inspect.signature(fusion)
    except ValueError:  # a builtin without a signature
        return True
    try:
        signature.bind(None, **({} if of == "graph" else {"recipe": None}))
    except TypeError:
        return False
    return True


def _registering(of: Kind, phase: Phase, fusion: Fusion) -> str:
    if of == "graph":
        return f'te_dynamo.register_graph_fusion({fusion_name(fusion)}, phase="{phase}")'
    return f"te_dynamo.register_{'forward_backward' if phase == 'joint' else phase}_fusion({fusion_name(fusion)})"


def _described(fusion: Fusion) -> str:
    """Its name, and the file and line of its code where it has any of its own."""
    function = inspect.unwrap(fusion.func if isinstance(fusion, functools.partial) else fusion)
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    return fusion_name(fusion) + (f" ({code.co_filename}:{code.co_firstlineno})" if code else "")


def _plain(fusion: Fusion) -> Fusion:
    return fusion.fusion if isinstance(fusion, _Registration) else fusion


def _lists() -> list[list[Fusion]]:
    return [fusions for phases in _registered.values() for fusions in phases.values()]


def _update_digest() -> None:
    global _digest
    text = "\n".join(_keys("ops"))
    _digest = hashlib.sha256(text.encode()).hexdigest()[:12] if text else ""


def _keys(of: Kind) -> list[str]:
    return [
        f"{of}:{phase}:{fusion_name(f)}:{_source(f)}" for phase, fusions in _registered[of].items() for f in fusions
    ]


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
