"""A test file run as a program, in a process whose kernels run in Triton's interpreter."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from typing import Any


def run_in_interpreter(file: str, *arguments: str) -> None:
    """Runs `python file arguments...`. Triton reads TRITON_INTERPRET where it is imported, so a process that has kernels is too late."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", __name__, file, *arguments]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def make_quick() -> None:
    """Leaves out what Triton's interpreter does in vain, most of its time.

    At each call of a device function it looks through the whole language for what it has to change: what it has changed for a launch
    stays so until its end. And it computes each sum of integers a second time, to assert what it only asserts where it debugs.
    """
    from triton.runtime import interpreter

    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
    patch, execute = interpreter._patch_lang, interpreter.GridExecutor.__call__
    patched: set[int] = set()

    def patch_lang(fn: Callable[..., Any]) -> Any:
        if id(fn.__globals__) in patched:
            return None
        patched.add(id(fn.__globals__))
        return patch(fn)

    def call(self: Any, *arguments: Any, **named: Any) -> None:
        patched.clear()
        execute(self, *arguments, **named)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_lang, call


if __name__ == "__main__":
    make_quick()
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
