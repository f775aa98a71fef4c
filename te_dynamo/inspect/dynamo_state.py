"""Dynamo's memory of what it has compiled, set aside while `explain` compiles: its answer depends on no call before, and no call after on it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import CodeType
from typing import Any

import torch

__all__ = ["dynamo_untouched"]


@contextlib.contextmanager
def dynamo_untouched() -> Iterator[None]:
    """Inside, Dynamo has seen no size of an input before, and compiles however often it has. Afterwards it knows the sizes that it knew
    before, and of what was compiled inside alone nothing is left. Code that had been compiled before keeps all entries, those of inside too.
    """
    from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list, reset_code
    from torch._dynamo import pgo
    from torch._dynamo.convert_frame import register_bytecode_hook

    had_entries: dict[CodeType, bool] = {}

    def compiled(code: CodeType, new_code: Any) -> None:
        had_entries.setdefault(code, bool(_debug_get_cache_entry_list(code)))

    sizes = pgo.get_code_state()  # of inputs, by code: what differs from call to call is compiled as a symbol
    before = dict(sizes)
    sizes.clear()
    hook = register_bytecode_hook(compiled)
    try:
        with torch._dynamo.config.patch(recompile_limit=1 << 30, accumulated_recompile_limit=1 << 30):
            yield
    finally:
        hook.remove()
        sizes.clear()
        sizes.update(before)
        for code in [code for code, had in had_entries.items() if not had]:
            reset_code(code)
