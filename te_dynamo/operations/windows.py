"""How a fusion finds its operations in a list."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Optional

from te_dynamo.operations.op import FusibleOperation

__all__ = ["sliding_window"]


def sliding_window(
    ops: Sequence[FusibleOperation],
    types: Sequence[type | tuple[type, ...]],
    fuse: Callable[[tuple[Any, ...]], Optional[FusibleOperation]],
) -> list[FusibleOperation]:
    """The list with every run of operations of these types replaced by what `fuse(run)` gives, unless that is None.

    From the left, without overlaps. `fuse` is called with exactly len(types) operations whose types are right already.
    """
    result: list[FusibleOperation] = []
    rest = list(ops)
    while rest:
        window = tuple(rest[: len(types)])
        fits = len(window) == len(types) and all(map(isinstance, window, types))
        fused = fuse(window) if fits else None
        result.append(rest[0] if fused is None else fused)
        rest = rest[1 if fused is None else len(types) :]
    return result
