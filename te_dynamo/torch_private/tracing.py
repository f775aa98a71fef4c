"""What torch's own tools show of us: artifacts that tlparse lists, times in torch._dynamo.utils.compile_times(), names in profiles."""

from __future__ import annotations

import contextlib
import functools
import logging
import pkgutil
from collections.abc import Callable
from typing import Any

import torch

from te_dynamo.torch_private.private import Private
from te_dynamo.torch_private.table import ARTIFACT, PROFILED, TIMED


def is_traced() -> bool:
    """Whether torch writes a trace: TORCH_TRACE names its folder. Other handlers, such as pytest's on every logger, get none of ours."""
    return any(type(handler).__module__.startswith("torch.") for handler in logging.getLogger("torch.__trace").handlers)


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


def named_in_profiles(call: Callable[..., Any]) -> Callable[..., Any]:
    """`call` with one more keyword, `name`, under which a profiler shows it. While none runs that costs the look at a flag."""
    flags = vars(torch.autograd.profiler)
    flag = PROFILED.name.rpartition(".")[2]

    @functools.wraps(call)
    def named(*args: Any, name: str, **keywords: Any) -> Any:
        if not flags.get(flag):
            return call(*args, **keywords)
        with torch.profiler.record_function(name):
            return call(*args, **keywords)

    return named


def _found(private: Private) -> Callable[..., contextlib.AbstractContextManager[object]] | None:
    """The function, None where this torch has none of that name: `install` then says what is lost."""
    return pkgutil.resolve_name(private.name) if private.active else None  # type: ignore[no-any-return]
