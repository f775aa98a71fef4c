"""In a package a weight's scale stays a tensor, which our kernels read.

Inductor writes a constant of at most eight numbers into its own code. Of a scale that a launch reads it would make a kernel of its own, which
computes that one number again in every call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def can_inline_constant(own: Callable[..., bool], constant: Any) -> bool:
    """GraphLowering.can_inline_constant, which is `own`."""
    from torch._inductor import config

    return not config.aot_inductor.package and own(constant)
