"""Launchers of our kernels: torch's own where it can be, and Triton's built in threads.

Triton (3.6) launches a kernel by a function that a C compiler builds for each signature, a tenth to a fifth of a second each, one
after the other. torch's own launcher needs none. Inductor gives it to the kernels that it generates, and to those of others where
an option of its says so. That is decided by the worker process which compiles the kernel, and a worker is told other options than
this one: so it is told.

A kernel with a launch attribute or scratch memory has Triton's launcher all the same. It is built in a thread as soon as the kernel
comes from its worker, not when the kernel is loaded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from te_dynamo.torch_private.table import STATIC_LAUNCH

_TOLD = "use_static_triton_launcher"
"""Of the options with which a worker compiles a kernel, the one that is always there."""


def submit(own: Callable[..., Future[Any]], pool: Any, job: Callable[..., Any], *arguments: Any) -> Future[Any]:
    """SubprocPool.submit, which is `own`: a worker compiles as the process that asks it would, as to that option."""
    from torch._inductor import config

    if not any(isinstance(x, dict) and _TOLD in x for x in arguments):  # the pool is asked for other things too
        return own(pool, job, *arguments)
    told = {STATIC_LAUNCH: getattr(config, STATIC_LAUNCH)}
    return _with_launchers(
        own(pool, job, *({**x, **told} if isinstance(x, dict) and _TOLD in x else x for x in arguments))
    )


def _with_launchers(task: Future[Any]) -> Future[Any]:
    """`task`, a worker's compilation of a kernel, which counts as done when Triton's cache has the kernel's launchers too.

    Its result or error is what it was, or it is cancelled too. A launcher that cannot be built is built again where it is loaded,
    and raises there.
    """
    from torch._inductor.async_compile import AsyncCompile

    ready: Future[Any] = Future()

    def build(compiled: list[Any]) -> None:
        with contextlib.suppress(Exception):
            _build(compiled)
        ready.set_result(task.result())

    def arrived(_: Future[Any]) -> None:
        if task.cancelled():
            ready.cancel()
            ready.set_running_or_notify_cancel()  # what waits for several learns of it by this
            return
        if (error := task.exception()) is not None:
            ready.set_exception(error)
            return
        if compiled := _launched_by_triton(task.result()):
            with contextlib.suppress(RuntimeError):  # the process ends, and starts no thread any more
                AsyncCompile.pool().submit(build, compiled)  # this thread reads what workers answer
                return
        ready.set_result(task.result())

    task.add_done_callback(arrived)
    return ready


def _launched_by_triton(answer: Any) -> list[Any]:
    """Of a worker's answer, (the kernel as Inductor's autotuner, the time it took), the compiled kernels with such launchers."""
    from torch._inductor.runtime.triton_heuristics import TritonCompileResult

    autotuner = answer[0] if isinstance(answer, tuple) and answer else None
    results = getattr(autotuner, "compile_results", ())
    return [result.kernel for result in results if isinstance(result, TritonCompileResult)]


def _build(compiled: list[Any]) -> None:
    from triton.runtime import driver

    for kernel in compiled:
        driver.active.launcher_cls(kernel.src, kernel.metadata)
