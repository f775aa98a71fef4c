"""How Inductor's code launches a kernel before its predecessor ends (kernels/runtime/dependent_launch.py).

Inductor takes a launch's attributes from the kernel's description in the code that it writes, and has no way to set this one for a
kernel that it did not write itself. A launch of ours says so by the kernel's constant EARLY.
"""

from __future__ import annotations

import functools
from typing import Any

__all__ = ["launch_early_kernels_early"]

_EARLY = "'EARLY': True"
_DESCRIPTION = "triton_meta={"


@functools.cache
def launch_early_kernels_early() -> None:
    """Tells Inductor; once a process. Its code in C++ knows the attribute from torch 2.15 on, and waits in vain before."""
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen

    define = PythonWrapperCodegen.define_kernel

    @functools.wraps(define)
    def define_kernel(self: Any, kernel_name: str, kernel_body: str, *args: Any, **kwargs: Any) -> Any:
        if _EARLY in kernel_body:
            kernel_body = kernel_body.replace(_DESCRIPTION, f"{_DESCRIPTION}'launch_pdl': True, ", 1)
        return define(self, kernel_name, kernel_body, *args, **kwargs)

    PythonWrapperCodegen.define_kernel = define_kernel  # type: ignore[method-assign]
