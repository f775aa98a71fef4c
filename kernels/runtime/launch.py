"""Launching a Triton kernel in the one way that works eagerly and inside a graph that Inductor compiles."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode, _get_current_dispatch_mode_stack

from te_dynamo.kernels.runtime._triton import triton
from te_dynamo.kernels.runtime.prepared import Prepared, launched_early, prepared_of
from te_dynamo.kernels.runtime.scratch import scratch
from te_dynamo.kernels.runtime.target import target_of


def launch(kernel: Any, grid: tuple[Any, ...], /, *args: Any, **kwargs: Any) -> None:
    """kernel[grid](*args, **kwargs), run now or, under `make_fx`, recorded for Inductor's code to launch.

    Give every argument of the kernel explicitly (torch takes every tensor for mutated when one is left to its
    default), name none of them `out` (the pattern matcher refuses it), and make tensor descriptors inside the
    kernel. `num_warps` and `num_stages` may stand among the keyword arguments. EARLY=True, of a kernel that has it: launched
    before its predecessor ends (kernels/runtime/dependent_launch.py).
    """
    if _is_run_now(kernel):
        prepared, own = prepared_of(kernel, args, kwargs)
        prepared.run(grid, own)
    elif _compiling_only.get():
        options = kwargs if is_recording() else launched_early(kwargs)
        kernel.warmup(*(_untouched(x) for x in args), grid=grid, **{name: _untouched(x) for name, x in options.items()})
    else:
        triton.set_allocator(scratch)
        (torch.library.wrap_triton(kernel) if is_recording() else kernel)[grid](*args, **kwargs)


def launch_prepared(prepared: Prepared, grid: tuple[Any, ...], /, *args: Any) -> None:
    """`launch` of its kernel and constants, which one place holds because it launches the same again and again."""
    if _is_run_now(prepared.kernel):
        prepared.run(grid, args)
    else:
        launch(prepared.kernel, grid, *args, **prepared.constants)


def _is_run_now(kernel: Any) -> bool:
    """Whether a kernel is compiled and launched here: not compiled only, not recorded, and not of Triton's interpreter."""
    return not (is_recording() or _compiling_only.get()) and isinstance(kernel, triton.JITFunction)


_compiling_only: contextvars.ContextVar[bool] = contextvars.ContextVar("te_dynamo_compiling_only", default=False)


@contextlib.contextmanager
def compiling_only() -> Iterator[None]:
    """Inside, `launch` compiles for the current device and launches nothing; tensors need no memory, and count as aligned."""
    token = _compiling_only.set(True)
    try:
        yield
    finally:
        _compiling_only.reset(token)


def _untouched(argument: Any) -> Any:
    """What stands for an argument where nothing is launched: for a tensor, something of its dtype."""
    from triton import MockTensor

    return MockTensor(argument.dtype) if isinstance(argument, torch.Tensor) else argument


def is_recording() -> bool:
    """Whether launches are recorded, for Inductor's code, which launches kernels of the Triton language only.

    Torch's own modes tell it (fake tensors, proxies). Others watch what runs, as AOTAutograd does the first call of every graph.
    """
    return _get_current_dispatch_mode() is not None and any(
        mode.is_infra_mode() for mode in _get_current_dispatch_mode_stack()
    )


def size_hint(size: int | torch.SymInt, fallback: int = 8192) -> int:
    """The number a size has while compiling, without a guard; `fallback` for one known only at run time."""
    if isinstance(size, torch.SymInt):
        hint = size.node.hint if size.node.has_hint() else fallback
        return int(hint)
    return size


def multiprocessor_count(device: torch.device) -> int:
    """Multiprocessors of a CUDA device; an H200's where no GPU can be asked."""
    return target_of(device).multiprocessors
