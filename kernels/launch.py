"""How every launcher starts a Triton kernel: the same call runs eagerly and traces into Inductor's code."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["launch", "size_hint"]


def launch(kernel: Any, grid: tuple, /, *args: Any, **kwargs: Any) -> None:
    """Runs `kernel` over `grid`; under make_fx it becomes a node that Inductor calls without a dispatcher."""
    torch.library.wrap_triton(kernel)[grid](*args, **kwargs)


def size_hint(n: int | torch.SymInt) -> int:
    """A likely value of a size, without a guard on it."""
    if isinstance(n, torch.SymInt):
        hint = n.node.hint
        return int(hint) if hint is not None else 8192
    return int(n)
