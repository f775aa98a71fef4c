"""lowering/inductor/workers.py: workers are told who launches a kernel, which has arrived when its launcher is there."""

from __future__ import annotations

from concurrent.futures import CancelledError, Future, wait
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._inductor import config
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.utils import fresh_cache
from torch.nn import functional as F

from te_dynamo.kernels.runtime._triton import INSTALLED
from te_dynamo.lowering.inductor.workers import STATIC_LAUNCH, _with_launchers, submit

pytestmark = pytest.mark.skipif(not INSTALLED, reason="launchers are Triton's")


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is given to threads, which are not there."""
    given: list[Any] = []
    pool = SimpleNamespace(submit=lambda job, *arguments: given.append(lambda: job(*arguments)))
    monkeypatch.setattr(AsyncCompile, "pool", staticmethod(lambda: pool))
    return given


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    from triton.runtime import driver

    made: list[Any] = []

    def launcher(src: Any, metadata: Any) -> None:
        made.append((src, metadata))
        if src == "broken":
            raise RuntimeError("no C compiler")

    monkeypatch.setattr(driver, "_active", SimpleNamespace(launcher_cls=launcher), raising=False)
    return made


def answer(*kernels: tuple[str, bool]) -> Any:
    """A worker's: (the source's name, whether Triton launches it) of each configuration."""
    from torch._inductor.runtime.triton_heuristics import StaticTritonCompileResult, TritonCompileResult

    results = []
    for name, by_triton in kernels:
        cls: Any = TritonCompileResult if by_triton else StaticTritonCompileResult
        results.append(cls.__new__(cls))
        results[-1].kernel = SimpleNamespace(src=name, metadata=f"{name}'s")
    return SimpleNamespace(compile_results=results), 17


def test_a_kernel_waits_for_its_launcher(jobs: list[Any], built: list[Any]) -> None:
    task: Future[Any] = Future()
    ready = _with_launchers(task)
    given = answer(("a", True), ("b", False))
    task.set_result(given)
    assert not ready.done() and not built
    jobs.pop()()
    assert ready.result(0) is given and built == [("a", "a's")]


def test_a_launcher_that_fails_is_not_this_ones_to_report(jobs: list[Any], built: list[Any]) -> None:
    task: Future[Any] = Future()
    ready = _with_launchers(task)
    task.set_result(answer(("broken", True)))
    jobs.pop()()
    assert ready.result(0) is task.result(0)


def test_a_cancelled_task_is_answered(jobs: list[Any], built: list[Any]) -> None:
    task: Future[Any] = Future()
    ready = _with_launchers(task)
    assert task.cancel()
    with pytest.raises(CancelledError):
        ready.result(0)
    assert wait([ready], 0).done == {ready} and not jobs


@pytest.mark.parametrize(
    "result", ["ready", (), answer(("b", False)) if INSTALLED else None], ids=["other", "empty", "torch's"]
)
def test_what_needs_no_launcher_passes(jobs: list[Any], built: list[Any], result: Any) -> None:
    task: Future[Any] = Future()
    ready = _with_launchers(task)
    task.set_result(result)
    assert ready.result(0) is result and not jobs and not built


def test_no_thread_at_the_end_of_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def submit(*_: Any) -> None:
        raise RuntimeError("cannot schedule new futures after shutdown")

    monkeypatch.setattr(AsyncCompile, "pool", staticmethod(lambda: SimpleNamespace(submit=submit)))
    task: Future[Any] = Future()
    ready = _with_launchers(task)
    task.set_result(answer(("a", True)))
    assert ready.result(0) is task.result(0)


def test_an_error_passes(jobs: list[Any]) -> None:
    task: Future[Any] = Future()
    ready = _with_launchers(task)
    task.set_exception(RuntimeError("ptxas"))
    assert ready.exception(0) is task.exception(0) and not jobs


def test_only_compilations_wait() -> None:
    """The pool is asked for other things too."""
    task: Future[Any] = Future()
    assert submit(lambda *_: task, "pool", len, "kernel") is task
    assert submit(lambda *_: task, "pool", len, "kernel", {"use_static_triton_launcher": True}) is not task


def test_a_worker_is_told_the_option_of_its_asker() -> None:
    asked: list[Any] = []

    def own(*arguments: Any) -> Future[Any]:
        asked.append(arguments)
        return Future()

    for said in (True, False):
        with config.patch({STATIC_LAUNCH: said}):
            submit(own, "pool", len, "kernel", {"A_FOLDER": "x"}, {"use_static_triton_launcher": True})
        told = {"use_static_triton_launcher": True, STATIC_LAUNCH: said}
        assert asked.pop() == ("pool", len, "kernel", {"A_FOLDER": "x"}, told)


@pytest.mark.gpu
def test_kernels_have_torchs_launcher() -> None:
    """All but the GEMMs, which make tensor descriptors in scratch memory."""
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner, StaticTritonCompileResult

    launched: dict[str, bool] = {}
    run = CachingAutotuner.run

    def running(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = run(self, *args, **kwargs)
        launched[self.fn.__name__] = all(isinstance(x, StaticTritonCompileResult) for x in self.compile_results)
        return result

    x = torch.randn(1024, 1024, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(1024, 1024, device="cuda", dtype=torch.bfloat16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CachingAutotuner, "run", running)
        with fresh_cache():
            torch.compile(lambda x: F.silu(F.linear(x, w)).relu(), backend="te")(x)
    others = {name: static for name, static in launched.items() if "gemm" not in name}
    assert any(name.startswith("quantize") for name in others) and all(others.values()), launched
