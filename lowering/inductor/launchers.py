"""The C launchers that Triton (3.6) has a compiler build, one for each signature: in threads, as kernels come from Inductor's workers.

Only kernels that torch's own launcher does not serve have one (lowering/inductor/static_launch.py). Inductor would build them in turn, a fifth
of a second each, when it loads the kernels.
"""

from __future__ import annotations

import contextlib
from concurrent.futures import Future
from typing import Any

__all__ = ["with_launchers"]


def with_launchers(task: Future[Any]) -> Future[Any]:
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
