"""Kernels that Inductor's code will call without a launch of its own are compiled in threads, while Inductor writes that code.

Inductor compiles the kernels whose launches it writes in worker processes, all at once. Of an extern call (lowering/extern/gemm.py)
it knows no kernel: compiled at its first call, each would take about a second, one after the other.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from te_dynamo.kernels.runtime.launch import compiling_only
from te_dynamo.torch_private.table import AHEAD

_MOST_THREADS = 16


@contextlib.contextmanager
def compiles_ahead() -> Iterator[None]:
    """Inside, what `compile_ahead` is given is compiled in threads; at the end all of it is there.

    A kernel that fails to compile raises where it is launched, as it would without this.
    """
    if not AHEAD.active or _mode() is not None:
        yield
        return
    from triton.runtime._async_compile import AsyncCompileMode

    threads = min(_MOST_THREADS, os.cpu_count() or 1)
    with concurrent.futures.ThreadPoolExecutor(threads) as pool, AsyncCompileMode(pool, ignore_errors=True):
        yield


def compile_ahead(launches: Callable[..., Any], tensors: Sequence[torch.Tensor], **keywords: Any) -> None:
    """Compiles what `launches(*tensors, **keywords)` would launch. tensors: fakes on a CUDA device.

    Nothing where there is no GPU, where shapes are symbolic, and outside `compiles_ahead`.
    """
    if not torch.cuda.is_available() or not AHEAD.active or _mode() is None:
        return
    if any(isinstance(size, torch.SymInt) for tensor in tensors for size in tensor.shape):
        return
    with torch.cuda.device(tensors[0].device), compiling_only():
        launches(*tensors, **keywords)


def _mode() -> Any:
    """Triton's mode in which a compilation goes to threads, None outside one."""
    from triton.runtime._async_compile import active_mode

    return active_mode.get()
