"""Launches of a kind that was launched before, without asking Triton again what is to be compiled for them.

`kernel[grid](...)` looks at every argument, at all constants that the kernel reads and at Triton's own settings, which takes the CPU some
50 us a call; what it returns, the compiled kernel, is launched in a third of that. Code that launches so is Triton's own, as in its tutorials:
`compiled[grid](...)` with every argument of the kernel in order.
"""

from __future__ import annotations

from typing import Any

import torch

from te_dynamo.kernels.runtime._triton import triton

_MOST = 4096  # kinds: one of each shape, so that a model of ever new ones starts afresh

_known: dict[tuple[Any, ...], tuple[Any, Any]] = {}
"""{kind: (kernel, what Triton compiled of it)}; the kernel is kept for its id, which is part of the kind."""


def launch_known(kernel: Any, grid: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """kernel[grid](*args, **kwargs), of a kernel all of whose arguments are given.

    Triton compiles for a tensor's dtype and whether it is aligned to 16 bytes, and for a few properties of an integer. All other
    values, options among them, are part of what it compiles.
    """
    if not isinstance(kernel, triton.JITFunction):  # its interpreter's
        kernel[grid](*args, **kwargs)
        return
    device = triton.runtime.driver.active.get_current_device()
    kind = (id(kernel), device, *map(_seen, args), *((name, _seen(x)) for name, x in kwargs.items()))
    known = _known.get(kind)
    if known is None:
        compiled = kernel[grid](*args, **kwargs)
        if isinstance(compiled, triton.compiler.CompiledKernel):
            if len(_known) == _MOST:
                _known.clear()
            _known[kind] = kernel, compiled
        return
    values = (*args, *(kwargs[name] for name in kernel.arg_names[len(args) :]))
    known[1][(*grid, 1, 1)[:3]](*values)


def _seen(x: Any) -> tuple[Any, ...]:
    return (x.dtype, x.data_ptr() % 16 == 0) if isinstance(x, torch.Tensor) else (type(x), x)
