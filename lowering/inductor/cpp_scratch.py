"""Scratch memory for every program of a launch in Inductor's C++ code.

A kernel that makes tensor descriptors writes them to scratch memory, a piece for each program. torch 2.11 allocates one piece in the
code that it writes in C++ (cpp_wrapper), so that programs overwrite each other's descriptors and what lies behind: wrong numbers,
without an error. Later releases multiply by the grid, as is done here.
"""

from __future__ import annotations

import functools
import re
from typing import Any

__all__ = ["allocate_for_all_programs"]

_PROGRAMS = "grid_0 * grid_1 * grid_2"
"""As the C++ code names them where it allocates."""


@functools.cache
def allocate_for_all_programs() -> None:
    """Corrects torch, once a process, where that is needed."""
    from torch._inductor.codegen.cuda.device_op_overrides import CUDADeviceOpOverrides

    if _PROGRAMS not in "".join(_definition(CUDADeviceOpOverrides())):
        CUDADeviceOpOverrides.cpp_scratch = _multiplied(CUDADeviceOpOverrides.cpp_scratch)  # type: ignore[method-assign]


def _definition(overrides: Any) -> list[str]:
    """What torch writes for 128 bytes a program."""
    from torch._inductor.codegen.common import TritonScratchWorkspace

    definition, _ = overrides.cpp_scratch(0, workspace=TritonScratchWorkspace(128, lambda: "cached_torch_dtype_uint8"))
    return definition


def _multiplied(cpp_scratch: Any) -> Any:
    @functools.wraps(cpp_scratch)
    def multiplied(*args: Any, **kwargs: Any) -> Any:
        definition, name = cpp_scratch(*args, **kwargs)
        size = r"_size\[\] = \{(\d+)\};"
        all_programs = rf"_size[] = {{static_cast<int64_t>(\1) * {_PROGRAMS}}};"
        return [re.sub(size, all_programs, line) for line in definition], name

    return multiplied
