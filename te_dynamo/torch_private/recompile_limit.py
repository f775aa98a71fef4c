"""Dynamo's limit of compilations, said where a function of ours meets it: from then on Dynamo asks no backend about that function."""

from __future__ import annotations

import re
import warnings
import weakref
from collections.abc import Callable
from types import CodeType
from typing import Any

import torch
from torch import nn

from te_dynamo.user_code import is_torchs

_compiled: weakref.WeakValueDictionary[int, CodeType] = weakref.WeakValueDictionary()
"""What the backend has compiled, by identity: code that is equal may be another model's."""


def compiled_here(code: CodeType | None) -> None:
    """Remembers a function whose limit is to be told."""
    if code is not None:
        _compiled[id(code)] = code


def recompilation_reasons(
    own: Callable[..., list[str]], cache_entries: Any, frame: Any, *args: Any, **kwargs: Any
) -> list[str]:
    """Torch's own reasons why a function is compiled again, and a warning where it is not, since the limit is met."""
    from torch._dynamo.convert_frame import compute_cache_size, exceeds_recompile_limit

    reasons: list[str] = own(cache_entries, frame, *args, **kwargs)
    code: CodeType = frame.f_code
    compile_id = torch._guards.CompileContext.current_compile_id()
    if _compiled.get(id(code)) is code and compile_id is not None:
        exceeded, limit = exceeds_recompile_limit(compute_cache_size(frame, cache_entries), compile_id)
        if exceeded:
            last = reasons[0].partition(": ")[2].partition("\n")[0].partition("  #")[0].strip() if reasons else ""
            text = past_limit(_name(frame), getattr(torch._dynamo.config, limit), limit)
            text += f". The last difference: {last}" if last else ""
            warnings.warn_explicit(f"te_dynamo: {text}", UserWarning, code.co_filename, code.co_firstlineno)
    return reasons


def past_limit(name: str, times: int, limit: str = "recompile_limit") -> str:
    """What becomes of a function that Dynamo has compiled as often as the setting `limit` lets it, and what helps."""
    return (
        f"Dynamo has compiled {name} {times} times, its limit, and runs it as it is for other inputs: call torch._dynamo.reset(), or "
        f"set torch._dynamo.config.{limit} higher before the first call; TORCH_LOGS=recompiles says what differed, and "
        "fullgraph=True makes it an error"
    )


def the_rest(code: CodeType, name: str = "") -> str:
    """ "the rest of forward behind net.py:19" of what Dynamo made of a function, called `name`, behind a graph break; "" of other code."""
    resumed = re.fullmatch(r"torch_dynamo_resume_in_(.*)_at_\d+", code.co_name)
    return f"the rest of {name or resumed[1]} behind {_place(code)}" if resumed else ""


def _name(frame: Any) -> str:
    """ "Net.forward (net.py:8)"."""
    code, called = frame.f_code, frame.f_locals.get("fn")
    if isinstance(called, nn.Module) and is_torchs(code.co_filename):  # torch's way to a model whose class is its own
        return f"{type(called).__name__}.forward"
    return the_rest(code) or f"{getattr(code, 'co_qualname', code.co_name)} ({_place(code)})"


def _place(code: CodeType) -> str:
    return f"{code.co_filename.rpartition('/')[2]}:{code.co_firstlineno}"
