"""How fusions look at a list of operations: a window of so many, their types checked before anything else is asked."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Optional

from te_dynamo.fusion_registry import Fusion
from te_dynamo.operations.op import FusedOperation, FusibleOperation
from te_dynamo.recipe import Recipe

Window = tuple[Any, ...]
"""Operations that stand next to one another, of the types that were asked for."""


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


def fusion_of_windows(
    *windows: Sequence[Any],
) -> Callable[[Callable[[Window], Optional[FusedOperation]]], Fusion]:
    """Makes a fusion of a function from a window of operations: what is put there, or None. Of several windows the first goes first."""

    def decorate(function: Callable[[Window], Optional[FusedOperation]]) -> Fusion:
        def fuse(ops: Sequence[FusibleOperation], *, recipe: Optional[Recipe]) -> list[FusibleOperation]:
            found = list(ops)
            for types in windows:
                found = sliding_window(found, types, function)
            return found

        functools.update_wrapper(fuse, function)
        del fuse.__wrapped__  # type: ignore[attr-defined]  # its signature is another
        return fuse

    return decorate


def _is_of(op: FusibleOperation, types: type | tuple[type, ...]) -> bool:
    several = types if isinstance(types, tuple) else (types,)
    return any(type(op) is cls or (_is_abstract(cls) and isinstance(op, cls)) for cls in several)


def _is_abstract(cls: type) -> bool:
    return not ({"forward_overload", "backward_overload"} & set(vars(cls)))
