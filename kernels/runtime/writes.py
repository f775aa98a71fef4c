"""What a kernel writes, said where it is defined.

torch finds that out of a kernel that it has not written itself by compiling it to Triton's IR, 50 ms for each kernel and set of
constants: a tenth of the time to compile a model. Where a kernel says it, nothing is compiled (lowering/inductor/mutation.py). That it is
true is tested against torch's analysis.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, TypeVar

T = TypeVar("T")


def writes(*always: str, **sometimes: str | Callable[[Any], bool]) -> Callable[[T], T]:
    """Marks a kernel: the tensors that it writes, always, or as its constants are.

    sometimes: {tensor: a constant that has to be true, or a function of all arguments, as lambda k: k.ROWWISE and not k.STACKED}. Where a
    tensor is not written, something else may stand in for it. `updates` also names the tensors that the kernel reads as well.
    """

    def mark(kernel: T) -> T:
        kernel.te_writes = {**dict.fromkeys(always, ""), **sometimes}  # type: ignore[attr-defined]
        return kernel

    return mark


def updates(*always: str, **sometimes: str | Callable[[Any], bool]) -> Callable[[T], T]:
    """Marks a kernel: of the tensors that it writes, those that it reads, and those of which it writes a part and leaves the rest."""

    def mark(kernel: T) -> T:
        kernel.te_updates = {**dict.fromkeys(always, ""), **sometimes}  # type: ignore[attr-defined]
        return kernel

    return mark


def updated(kernel: Any, arguments: Mapping[str, Any]) -> tuple[str, ...]:
    """The tensors that a launch of a marked kernel reads and writes."""
    declared = getattr(kernel, "te_updates", {})
    return tuple(name for name in declared if _holds(declared[name], arguments))


def written(kernel: Any, arguments: Mapping[str, Any]) -> list[str] | None:
    """The tensors that a launch writes, in the kernel's order; None of a kernel that is not marked."""
    declared = getattr(kernel, "te_writes", None)
    if declared is None:
        return None
    return [name for name in kernel.arg_names if name in declared and _holds(declared[name], arguments)]


def _holds(condition: str | Callable[[Any], bool], arguments: Mapping[str, Any]) -> bool:
    if callable(condition):
        return bool(condition(SimpleNamespace(**arguments)))
    return not condition or bool(arguments[condition])
