"""Triton's launcher where Inductor's code needs it, at the price of torch's own: for scratch memory and for launch attributes.

Inductor asks at each such launch for what Triton's hooks are told, because a chain of hooks counts as true when it is empty, and
allocates the scratch memory. Both together cost the CPU three times what is left. Hooks that are there are still told.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from te_dynamo.kernels.runtime._triton import triton
from te_dynamo.kernels.runtime.prepared import triton_is_watched
from te_dynamo.kernels.runtime.scratch import fresh, scratch


def make_launcher(own: Callable[..., Any], result: Any) -> Any:
    """TritonCompileResult.make_launcher, which is `own`: the function that launches a kernel."""
    told = own(result)
    with _no_hooks():
        untold = own(result)
    # A kernel that starts beside its predecessor's end must not write where that one's descriptors are.
    allocator = fresh if result.kernel.metadata.launch_pdl else scratch

    @functools.wraps(told)  # torch reads its attributes
    def launcher(*args: Any, **kwargs: Any) -> Any:
        triton.set_allocator(allocator)
        return (told if triton_is_watched() else untold)(*args, **kwargs)

    return launcher


@contextlib.contextmanager
def _no_hooks() -> Iterator[None]:
    runtime = triton.knobs.runtime
    with runtime.scope():
        runtime.launch_enter_hook = runtime.launch_exit_hook = None
        yield
