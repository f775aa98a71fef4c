"""The fuser of operations: from a list of basic operations to the groups that run forward, and those that run backward.

    1 joint      fusions of both halves; what they make is one object in both lists
    2 forward    on the joint list: only the forward half of what they make is used
    3 backward   on the joint list: only the backward half, and only the groups that have a gradient to compute

A fusion is `fuse(ops, *, recipe) -> list`: from a list of operations the same operations in the same order, some of them in fused
ones. Within a pass registered fusions run first, in the order of their registration, then the shipped ones in the order of
`fused.SHIPPED`; what an earlier one took, a later one does not see, so the first has priority. Each runs until it changes nothing
more, so fusing twice changes nothing. A fused operation may not be fused again: take its place before, with a fusion that is
registered earlier or matches more.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Optional

from te_dynamo.errors import FusionError
from te_dynamo.fusion_registry import Fusion, Phase, fusion_error, operation_fusions, registered
from te_dynamo.operations.fused import SHIPPED
from te_dynamo.operations.op import BasicOperation, FusedOperation, FusibleOperation
from te_dynamo.recipe import Recipe

Ops = list[FusibleOperation]


@dataclasses.dataclass(frozen=True)
class Group:
    """One operation to run, and which of the basic operations it stands for: [first, first + len(op.basic_ops))."""

    op: FusibleOperation
    first: int

    @property
    def indices(self) -> range:
        """The positions of its basic operations."""
        return range(self.first, self.first + len(self.op.basic_ops))


@dataclasses.dataclass(frozen=True)
class FusedOps:
    """What the fuser makes: groups in the order of forward; `backward` holds those from the first that needs a gradient on."""

    forward: tuple[Group, ...]
    backward: tuple[Group, ...]


class OperationFuser:
    """The groups of a list of operations.

    ops: basic operations, or fused ones, which are taken apart. recipe: that of the operations without one of their own.
    fusions: False leaves every operation by itself. shipped: False runs the registered fusions alone.

    `fuse` keeps its results: another recipe, other registered fusions or another first operation that needs a gradient fuse anew.
    """

    def __init__(
        self,
        ops: Sequence[FusibleOperation],
        *,
        recipe: Optional[Recipe] = None,
        fusions: bool = True,
        shipped: bool = True,
    ) -> None:
        for op in ops:
            if not isinstance(op, FusibleOperation):
                raise TypeError(f"OperationFuser: expected operations, got {type(op).__name__}")
        self.recipe = recipe
        self.fusions = fusions
        self.shipped = shipped
        self.basic_ops = tuple(basic.with_recipe(recipe) for op in ops for basic in op.basic_ops)

    def fuse(self, first_backward: int = 0) -> FusedOps:
        """The groups when the basic operations from `first_backward` on need gradients (their number: none does).

        Raises FusionError, naming the fusion, where one raises, does not end, or gives anything but the same basic operations in order.
        """
        if not self.fusions:
            return _unfused(self.basic_ops, first_backward)
        return _fused(self.basic_ops, self.recipe, first_backward, operation_fusions(), self.shipped)


@functools.lru_cache(maxsize=1024)
def _fused(
    ops: tuple[BasicOperation, ...], recipe: Optional[Recipe], first_backward: int, fusions: Any, shipped: bool = True
) -> FusedOps:
    """fusions: the registered ones, so that others are another entry of the cache."""
    joint = _pass("joint", list(ops), recipe, shipped)
    forward = _pass("forward", joint, recipe, shipped)
    needing = [group for group in grouped(joint) if group.indices.stop > first_backward]
    backward = _pass("backward", [group.op for group in needing], recipe, shipped)
    return FusedOps(grouped(forward), grouped(backward, needing[0].first if needing else len(ops)))


def _unfused(ops: tuple[BasicOperation, ...], first_backward: int) -> FusedOps:
    groups = grouped(list(ops))
    return FusedOps(groups, groups[first_backward:])


def grouped(ops: Sequence[FusibleOperation], first: int = 0) -> tuple[Group, ...]:
    """A group for each operation, the first one's basic operations counted from `first`."""
    groups = []
    for op in ops:
        groups.append(Group(op, first))
        first += len(op.basic_ops)
    return tuple(groups)


def _pass(phase: Phase, ops: Ops, recipe: Optional[Recipe], shipped: bool = True) -> Ops:
    for fusion in (*registered("ops", phase), *(SHIPPED[phase] if shipped else ())):
        changed = True
        while changed:  # ends: each round puts at least one basic operation into a fused one, which stays
            fused = _run(fusion, phase, ops, recipe)
            _check(fusion, phase, ops, fused)
            changed = not _same(ops, fused)
            ops = fused
    return ops


def _run(fusion: Fusion, phase: Phase, ops: Ops, recipe: Optional[Recipe]) -> Ops:
    try:
        fused = fusion(list(ops), recipe=recipe)
    except Exception as error:
        raise _error(fusion, phase, f"failed: {type(error).__name__}: {error}") from error
    if not isinstance(fused, list) or not all(isinstance(op, FusibleOperation) for op in fused):
        raise _error(fusion, phase, f"must return a list of operations, got {fused!r}")
    return fused


def _check(fusion: Fusion, phase: Phase, before: Ops, after: Ops) -> None:
    """The same basic operations in the same order, by identity; fused operations as they were; the halves that the pass needs."""
    old, new = _flat(before), _flat(after)
    if not _same(old, new):
        raise _error(fusion, phase, _difference(old, new))
    kept = {id(op) for op in after}
    for op in before:
        if isinstance(op, FusedOperation) and id(op) not in kept:
            raise _error(fusion, phase, f"took {op.describe()} apart, which an earlier fusion made")
    for op in after:
        for half in ("forward", "backward"):
            if phase in ("joint", half) and not getattr(op, f"has_{half}"):
                raise _error(fusion, phase, f"made {type(op).__name__}, which has no {half}, in the {phase} pass")


def _difference(old: list[BasicOperation], new: list[BasicOperation]) -> str:
    there = {id(op) for op in new}
    for op in old:
        if id(op) not in there and op.num_extra_outputs:
            return f"dropped {op.describe()}, and with it an extra output"
    if len(old) != len(new):
        return f"returned {len(new)} basic operations for {len(old)}"
    index = next(i for i, (a, b) in enumerate(zip(old, new, strict=True)) if a is not b)
    return (
        f"put {new[index].describe()} where {old[index].describe()} was (basic operation {index}): fused operations hold the "
        "operations that they were given, in order"
    )


def _flat(ops: Sequence[FusibleOperation]) -> list[BasicOperation]:
    return [basic for op in ops for basic in op.basic_ops]


def _same(one: Sequence[Any], other: Sequence[Any]) -> bool:
    return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))


def _error(fusion: Fusion, phase: Phase, problem: str) -> FusionError:
    without = (
        "Sequential(..., fusions=False) runs the operations without it, and so does "
        'options={"fusions": False} under torch.compile'
    )
    return fusion_error("ops", phase, fusion, f"{problem}. {without}")
