"""How fusions look at a list of operations: a window of so many, their types checked before anything else is asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Optional

from te_dynamo.operations.op import FusibleOperation


def sliding_window(
    ops: Sequence[FusibleOperation],
    types: Sequence[type | tuple[type, ...]],
    fuse: Callable[[tuple[Any, ...]], Optional[FusibleOperation]],
) -> list[FusibleOperation]:
    """The list with every run of operations of these types replaced by what `fuse(run)` gives, unless that is None.

    From the left, without overlaps. `fuse` is called with exactly len(types) operations whose types are right already. A class of
    operations stands for itself alone, since a subclass may compute something else; an abstract base stands for all of its subclasses.
    """
    result: list[FusibleOperation] = []
    rest = list(ops)
    while rest:
        window = tuple(rest[: len(types)])
        fits = len(window) == len(types) and all(map(_is_of, window, types))
        fused = fuse(window) if fits else None
        result.append(rest[0] if fused is None else fused)
        rest = rest[1 if fused is None else len(types) :]
    return result


def _is_of(op: FusibleOperation, types: type | tuple[type, ...]) -> bool:
    several = types if isinstance(types, tuple) else (types,)
    return any(type(op) is cls or (_is_abstract(cls) and isinstance(op, cls)) for cls in several)


def _is_abstract(cls: type) -> bool:
    return not ({"forward_overload", "backward_overload"} & set(vars(cls)))
