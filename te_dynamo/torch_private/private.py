"""Names that torch and Triton do not document: how one is described, found, and wrapped for graphs of ours alone.

table.py has them all; lowering/inductor/install.py puts the wrappers in place.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import pkgutil
import sys
import warnings
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch

from te_dynamo._compat import is_newer_than
from te_dynamo.errors import UnsupportedError
from te_dynamo.kernels.runtime._triton import INSTALLED

_TESTED = ((2, 11), (2, 15))
"""The releases of torch that all of this is tested with."""

_ours: contextvars.ContextVar[bool] = contextvars.ContextVar("te_dynamo_compiling_ours", default=False)


@contextlib.contextmanager
def compiling_ours() -> Iterator[None]:
    """Inside, on this thread, wrappers act; outside, torch's own functions run as if there were none."""
    token = _ours.set(True)
    try:
        yield
    finally:
        _ours.reset(token)


@dataclasses.dataclass(frozen=True)
class Private:
    """One name of torch's or Triton's that is used although nothing promises that it stays.

    name:    dotted, with its module: "torch._inductor.ir.ExternKernel". "torch.fx.Node()._dynamo_source" is an attribute of objects alone.
    owner:   who touches it: a file, or a folder; several with commas between.
    why:     what it is used for.
    gain:    what is lost without it. "" where graphs would fail or be wrong: then none compiles.
    everywhere: its wrapper acts outside of `compiling_ours` too, and itself leaves what is not ours as it is.
    needs:   further names without which it cannot be used.
    last:    the last release of torch that needs it; None for every release.
    """

    name: str
    owner: str
    why: str
    gain: str = ""
    needs: tuple[str, ...] = ()
    everywhere: bool = False
    last: tuple[int, int] | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.needs)

    @property
    def releases(self) -> str:
        """Those it is tested with: "2.11 to 2.15"."""
        first, last = _TESTED
        return "{}.{} to {}.{}".format(*first, *(self.last or last))

    @property
    def needed(self) -> bool:
        """Whether this torch needs it, and what it is a part of is there: Triton, torch.distributed."""
        outdated = self.last is not None and is_newer_than(self.last)
        absent = [] if INSTALLED else ["triton."]
        absent += [] if torch.distributed.is_available() else ["torch.distributed."]
        return not outdated and not any(name.startswith(tuple(absent)) for name in self.names)

    def missing(self) -> str:
        """The first of its names that is gone, "" where all are there."""
        return next((name for name in self.names if not _exists(name)), "")

    @property
    def active(self) -> bool:
        return self.needed and not self.missing()

    @property
    def state(self) -> str:
        """ "active", "not needed", or which name is gone and what that means."""
        if not self.needed:
            return "not needed"
        gone = self.missing()
        return f"{'skipped' if self.gain else 'cannot compile'}: {gone} is gone" if gone else "active"

    def require(self) -> None:
        """Raises UnsupportedError where one of its names is gone."""
        if gone := self.missing():
            without = f"there is no {self.gain}" if self.gain else "graphs would fail or be wrong"
            raise UnsupportedError(
                f"te_dynamo: torch {torch.__version__} has no {gone}, without which {without} ({self.why}): "
                f"install a release that has it; {self.releases} are tested"
            )

    def wrap(self, wrapper: Callable[..., Any]) -> None:
        """Puts `wrapper(torch's own function, *args, **kwargs)` in torch's function's place, unless it is there."""
        path, _, attribute = self.name.rpartition(".")
        owner = pkgutil.resolve_name(path)
        own, everywhere = getattr(owner, attribute), self.everywhere
        if hasattr(own, _MARK):
            return

        @functools.wraps(own)
        def ours_or_own(*args: Any, **kwargs: Any) -> Any:
            return wrapper(own, *args, **kwargs) if everywhere or _ours.get() else own(*args, **kwargs)

        setattr(ours_or_own, _MARK, True)
        static = isinstance(vars(owner).get(attribute), staticmethod)
        setattr(owner, attribute, staticmethod(ours_or_own) if static else ours_or_own)


_MARK = "_te_dynamo_wraps"


def _exists(name: str) -> bool:
    """Each graph asks for each name: what has been imported is looked up in there, without the import system."""
    try:
        module, attributes = _module_of(name.partition("()")[0])
        functools.reduce(getattr, attributes, module)
    except (ImportError, AttributeError):
        return False
    return True


@functools.cache
def _module_of(name: str) -> tuple[ModuleType, list[str]]:
    """(the module of a dotted name, its attributes there), of a name that is there: an error is not kept."""
    parts, modules = name.split("."), 0
    pkgutil.resolve_name(name)  # imports what it needs
    while modules < len(parts) and ".".join(parts[: modules + 1]) in sys.modules:
        modules += 1
    return sys.modules[".".join(parts[:modules])], parts[modules:]


@functools.cache
def warn_skipped(gone: str, gain: str) -> None:
    """Says once a process what is lost where a name is gone."""
    warnings.warn(
        f"te_dynamo: this release of torch or Triton has no {gone}, so that models lose {gain}; their numbers are the same. "
        "`python -m te_dynamo doctor` lists all such names, and the releases that have them",
        stacklevel=2,
    )
