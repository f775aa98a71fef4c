"""What is said of our kernels where Inductor defines them in its code.

Compiled at once: Inductor hands a kernel of its own to its worker processes as soon as it has written it. One of somebody else's is
handed to them when the finished code is imported, which waits for all of them.

Launched early: Inductor takes a launch's attributes from the kernel's description, and has no way to set the one by which a kernel
starts before its predecessor ends (kernels/runtime/dependent_launch.py). A launch of ours asks for it by the kernel's constant EARLY.
Inductor's code in C++ knows the attribute from torch 2.15 on; before, such a kernel waits in vain there, and is right.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

_OURS = "custom_kernel=True"
"""In the definition of a kernel that Inductor has not written."""

_EARLY = "'EARLY': True"
_DESCRIPTION = "triton_meta={"


def define_kernel(define: Callable[..., Any], wrapper: Any, name: str, body: str, *args: Any, **kwargs: Any) -> Any:
    """PythonWrapperCodegen.define_kernel, which is `define`. The code asks for the same kernel again, and gets what is being compiled."""
    if _EARLY in body:
        body = body.replace(_DESCRIPTION, f"{_DESCRIPTION}'launch_pdl': True, ", 1)
    if _OURS in body:
        _compile(body)
    return define(wrapper, name, body, *args, **kwargs)


def _compile(body: str) -> None:
    """Does what `body`, `async_compile.triton(name, source, device_str=...)`, will do; nothing where no worker is ready for it."""
    from torch._inductor.async_compile import AsyncCompile, get_compile_threads

    called = _arguments(body)
    if called is None or get_compile_threads() <= 1 or not AsyncCompile.use_process_pool():
        return
    arguments, keywords = called
    AsyncCompile().triton(*arguments, **keywords)


def _arguments(body: str) -> tuple[list[Any], dict[str, Any]] | None:
    """Those of a call of async_compile.triton, None for other code, as Inductor's in C++ is."""
    try:
        call = ast.parse(body.strip(), mode="eval").body
        if not isinstance(call, ast.Call) or ast.unparse(call.func) != "async_compile.triton":
            return None
        keywords = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords if keyword.arg}
        return [ast.literal_eval(argument) for argument in call.args], keywords
    except (SyntaxError, ValueError):
        return None
