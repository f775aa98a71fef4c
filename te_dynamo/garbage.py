"""While a graph is compiled, Python's garbage collector leaves old objects alone.

A full collection walks every object of the process, half a million once torch is imported. Graphs grow by so many objects that one comes
after the other, a tenth of the time in all, and finds nothing: what compilation keeps, it keeps to the end. What dies young is
collected as ever. Afterwards the next full collection is counted to from zero: Dynamo's guards are built without one.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

__all__ = ["without_full_collections"]

_NEVER = 2**31 - 1
_lock = threading.Lock()
_compiling = 0
_users = gc.get_threshold()


@contextlib.contextmanager
def without_full_collections() -> Iterator[None]:
    """Inside, in any number of threads, there is none; after the last, the user's thresholds hold again."""
    global _compiling, _users
    with _lock:
        if not _compiling:
            _users = gc.get_threshold()
            gc.set_threshold(*_users[:2], _NEVER)
        _compiling += 1
    try:
        yield
    finally:
        with _lock:
            _compiling -= 1
            if not _compiling and gc.get_threshold()[2] == _NEVER:  # or somebody has set others meanwhile
                gc.set_threshold(*_users)
                _start_over()


def _start_over() -> None:
    """The full collection that is due does not come at once, when Dynamo has guards to build and backward waits to be compiled.

    It is counted to anew: freezing sets the collector's counts to zero. Thawing has it walk those objects again.
    """
    if gc.isenabled() and not gc.get_freeze_count():  # or what the user has frozen would thaw
        gc.collect(1)
        gc.freeze()
        gc.unfreeze()
