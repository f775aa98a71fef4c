"""What torch's own tools show of a compilation: artifacts that tlparse lists, and times in torch._dynamo.utils.compile_times()."""

from __future__ import annotations

import contextlib
import logging
import pkgutil
from collections.abc import Callable

__all__ = ["ARTIFACT", "TIMED", "artifact", "is_traced", "timed"]

ARTIFACT = "torch._logging.trace_structured"
TIMED = "torch._dynamo.utils.dynamo_timed"


def is_traced() -> bool:
    """Whether torch writes a trace: TORCH_TRACE names its folder."""
    return bool(logging.getLogger("torch.__trace").handlers)


def artifact(name: str, encoding: str, payload: Callable[[], str]) -> None:
    """Adds `payload()` to torch's trace as the artifact `name`; it is not called where there is no trace.

    encoding: "string" or "json", as tlparse knows them.
    """
    write = _found(ARTIFACT)
    if write is not None and is_traced():
        write("artifact", metadata_fn=lambda: {"name": name, "encoding": encoding}, payload_fn=payload)


def timed(name: str) -> contextlib.AbstractContextManager[object]:
    """Inside, time counts for `name`."""
    count = _found(TIMED)
    return contextlib.nullcontext() if count is None else count(name)


def _found(name: str) -> Callable[..., contextlib.AbstractContextManager[object]] | None:
    """The function, None where this torch has none of that name: `install` then says what is lost."""
    try:
        found: Callable[..., contextlib.AbstractContextManager[object]] = pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return None
    return found
