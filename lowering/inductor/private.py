"""Functions that torch and Triton do not document: how one is described, found, and wrapped for graphs of ours alone.

lowering/inductor/install.py is the table of them.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import pkgutil
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from te_dynamo._compat import is_newer_than
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

    name:    dotted, with its module: "torch._inductor.ir.ExternKernel".
    why:     what it is used for.
    gain:    what is lost without it, which is time alone. "" where graphs would fail or be wrong: then none compiles.
    wrapper: called in place of the function as wrapper(torch's own function, *args, **kwargs). None: the name is used as it is.
    everywhere: the wrapper acts outside of `compiling_ours` too, and itself leaves what is not ours as it is.
    needs:   further names without which it cannot be used.
    last:    the last release of torch that needs it; None for every release.
    """

    name: str
    why: str
    gain: str = ""
    wrapper: Callable[..., Any] | None = None
    needs: tuple[str, ...] = ()
    everywhere: bool = False
    last: tuple[int, int] | None = None

    @property
    def effect(self) -> str:
        """Whether it is "wrapped" or "used"."""
        return "used" if self.wrapper is None else "wrapped"

    @property
    def releases(self) -> str:
        """Those it is tested with: "2.11 to 2.15"."""
        first, last = _TESTED
        return "{}.{} to {}.{}".format(*first, *(self.last or last))

    @property
    def needed(self) -> bool:
        """Whether this torch needs it, and Triton is there if it is Triton's."""
        outdated = self.last is not None and is_newer_than(self.last)
        return not outdated and (INSTALLED or not any(name.startswith("triton.") for name in (self.name, *self.needs)))

    def missing(self) -> str:
        """The first of its names that is gone, "" where all are there."""
        return next((name for name in (self.name, *self.needs) if not _exists(name)), "")

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

    def wrap(self) -> None:
        """Puts the wrapper in torch's function's place, unless it is there."""
        path, _, attribute = self.name.rpartition(".")
        owner = pkgutil.resolve_name(path)
        own, wrapper, everywhere = getattr(owner, attribute), self.wrapper, self.everywhere
        if wrapper is None or hasattr(own, _MARK):
            return

        @functools.wraps(own)
        def ours_or_own(*args: Any, **kwargs: Any) -> Any:
            return wrapper(own, *args, **kwargs) if everywhere or _ours.get() else own(*args, **kwargs)

        setattr(ours_or_own, _MARK, True)
        setattr(owner, attribute, ours_or_own)


_MARK = "_te_dynamo_wraps"


def _exists(name: str) -> bool:
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True


@functools.cache
def warn_skipped(gone: str, gain: str) -> None:
    """Says once a process what is lost where a name is gone."""
    warnings.warn(
        f"te_dynamo: this release of torch or Triton has no {gone}, so that models lose {gain}; their numbers are the same. "
        "`python -m te_dynamo doctor` lists all such names, and the releases that have them",
        stacklevel=2,
    )
