"""Our kernels are launched by torch's own launcher, not by one that Triton has a C compiler build for each signature.

Inductor launches the kernels that it generates so, and those of others where an option of its says so, for which building a launcher
took a tenth of a second for each in a forward, one after the other. A worker process, which decides it when it compiles a
kernel, is told other options than this one. A kernel with a launch attribute or scratch memory has Triton's launcher all the same
(lowering/inductor/launchers.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from te_dynamo.lowering.inductor.launchers import with_launchers

__all__ = ["STATIC_LAUNCH", "tell_workers"]

STATIC_LAUNCH = "static_launch_user_defined_triton_kernels"
"""Inductor's option."""

_TOLD = "use_static_triton_launcher"
"""Of the options with which a worker compiles a kernel, the one that is always there."""


def tell_workers() -> None:
    """From now on a worker compiles as the process that asks it would, as to that option, and its answer waits for the kernel's
    launchers. Nothing without a GPU or workers."""
    from torch._inductor.async_compile import AsyncCompile, get_compile_threads

    if not torch.cuda.is_available() or get_compile_threads() <= 1:
        return
    pool = AsyncCompile.process_pool()
    if not hasattr(pool.submit, "__wrapped__"):
        pool.submit = _telling(pool.submit)  # type: ignore[method-assign]


def _telling(submit: Callable[..., Any]) -> Callable[..., Any]:
    from torch._inductor import config

    def telling(job: Callable[..., Any], *arguments: Any) -> Any:
        told = {STATIC_LAUNCH: getattr(config, STATIC_LAUNCH)}
        given = [{**x, **told} if isinstance(x, dict) and _TOLD in x else x for x in arguments]
        task = submit(job, *given)
        compiles = any(isinstance(x, dict) and _TOLD in x for x in arguments)
        return with_launchers(task) if compiles else task

    telling.__wrapped__ = submit  # type: ignore[attr-defined]
    return telling
