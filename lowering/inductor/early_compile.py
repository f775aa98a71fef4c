"""Our kernels are compiled while Inductor still writes code, as its own are.

Inductor hands a kernel of its own to its worker processes as soon as it has written it. One of somebody else's is handed to them
when the finished code is imported, which waits for all of them: one second for the code of eight blocks.
"""

from __future__ import annotations

import ast
import functools
from typing import Any

__all__ = ["compile_when_defined"]

_OURS = "custom_kernel=True"
"""In the definition of a kernel that Inductor has not written."""


@functools.cache
def compile_when_defined() -> None:
    """Tells Inductor; once a process. Its code asks for the same kernel again, and gets what is being compiled."""
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen

    define = PythonWrapperCodegen.define_kernel

    @functools.wraps(define)
    def define_kernel(self: Any, kernel_name: str, kernel_body: str, *args: Any, **kwargs: Any) -> Any:
        if _OURS in kernel_body:
            _compile(kernel_body)
        return define(self, kernel_name, kernel_body, *args, **kwargs)

    PythonWrapperCodegen.define_kernel = define_kernel  # type: ignore[method-assign]


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
