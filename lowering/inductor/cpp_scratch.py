"""Scratch memory for every program of a launch in Inductor's C++ code.

A kernel that makes tensor descriptors writes them to scratch memory, a piece for each program. torch 2.11 allocates one piece in the
code that it writes in C++ (cpp_wrapper), so that programs overwrite each other's descriptors and what lies behind: wrong numbers,
without an error. Later releases multiply by the grid, as is done here.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

_PROGRAMS = "grid_0 * grid_1 * grid_2"
"""As the C++ code names them where it allocates."""


def cpp_scratch(own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """(the lines that allocate, the variable's name): CUDADeviceOpOverrides.cpp_scratch, which is `own`, for the whole grid."""
    lines, name = own(*args, **kwargs)
    all_programs = rf"_size[] = {{static_cast<int64_t>(\1) * {_PROGRAMS}}};"
    return [re.sub(r"_size\[\] = \{(\d+)\};", all_programs, line) for line in lines], name
