"""What a launch of our kernels reads and writes, analysed once for all launches that Triton compiles alike.

torch finds it out by compiling the kernel's source to Triton's IR, a twentieth of a second, and asks again for every launch of
every block and at every stage of Inductor. The answer depends on what that IR depends on: the kernel, the dtypes of its tensors,
the values of everything else. Other packages' kernels are torch's to analyse, as before.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch

__all__ = ["register"]


@functools.cache
def register() -> None:
    """Puts the memory in front of torch's analysis; once a process."""
    from torch._higher_order_ops import triton_kernel_wrap as torchs

    # torch 2.11 returns the names that are written, later ones what is read as well.
    name = "identify_accessed_tensors" if hasattr(torchs, "identify_accessed_tensors") else "identify_mutated_tensors"
    setattr(torchs, name, _remembered(getattr(torchs, name)))


def _remembered(analyse: Any) -> Any:
    known: dict[Any, Any] = {}

    @functools.wraps(analyse)
    def run(kernel: Any, kwargs: dict[str, Any], tma_descriptor_metadata: Any) -> Any:
        key = None if tma_descriptor_metadata else _key(kernel, kwargs)
        if key is None:
            return analyse(kernel, kwargs, tma_descriptor_metadata)
        if key not in known:
            known[key] = analyse(kernel, kwargs, tma_descriptor_metadata)
        return copy.copy(known[key])

    return run


def _key(kernel: Any, kwargs: dict[str, Any]) -> Any:
    """What the kernel's IR depends on; None for another package's kernel, or an argument whose part in it is not known."""
    if not str(getattr(kernel, "__module__", "")).startswith("te_dynamo.kernels."):
        return None
    arguments = [(name, _argument(value)) for name, value in sorted(kwargs.items())]
    key = (kernel, *arguments)
    try:
        hash(key)
    except TypeError:
        return None
    return None if any(argument is None for _, argument in arguments) else key


def _argument(value: Any) -> Any:
    import sympy
    from torch._inductor.ir import TensorBox
    from torch._subclasses.fake_tensor import FakeTensor

    if isinstance(value, (FakeTensor, TensorBox)):
        return "tensor", value.dtype
    if isinstance(value, torch.Tensor):
        return None  # a real one's address is looked at
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool, sympy.Expr)):
        return "symbol"  # torch puts one number in the place of all
    return type(value), value
