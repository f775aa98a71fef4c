"""What tests leave out of a compilation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from unittest import mock

import torch


def time_no_guards() -> AbstractContextManager[object]:
    """Dynamo times the guards of all that it compiles, for its log: 20 ms each, to flush the processor's caches before."""
    return mock.patch("torch._dynamo.guards.profile_guard_manager", lambda *_: 0.0, create=True)


def collect_no_garbage() -> AbstractContextManager[object]:
    """Dynamo has Python collect after each compilation, beside what Python does by itself."""
    return torch._dynamo.config.patch(run_gc_after_compile=False)


@contextmanager
def few_rows_too() -> Iterator[None]:
    """On (fake) CUDA tensors a linear of few rows would stay in bf16, for it is faster there; tests are of few rows."""
    match = "te_dynamo.passes.torch_ir.match"
    with (
        mock.patch(f"{match}.patterns.linears.linear.linear_cost_reason", lambda *_, **__: ""),
        mock.patch(f"{match}.cpu_known", lambda *_: nullcontext()),
    ):
        yield


@contextmanager
def explain_here_alone() -> Iterator[None]:
    """Without a GPU `explain` compiles a second time, for what an H200 would take: half of its time, and few tests look at that."""
    from te_dynamo.inspect import explain

    explain_for = explain._explain_for
    with (
        mock.patch.object(explain, "_DEFAULT_GPU", ""),
        mock.patch.object(explain, "_explain_for", lambda gpu, *given: explain_for(gpu, *given) if gpu else None),
    ):
        yield
