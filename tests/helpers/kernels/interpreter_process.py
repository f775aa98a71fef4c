"""A test file run as a program, in a process whose kernels run in Triton's interpreter.

Run as a program, this file is the process from which those of the test files are forked.
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any


def run_in_interpreter(file: str, *arguments: str) -> None:
    """Runs `python file arguments...`. Triton reads TRITON_INTERPRET where it is imported, so a process that has kernels is too late.

    The environment and the folder are those of the first call.
    """
    global _server
    if _server is None or _server.poll() is not None:
        command, environment = [sys.executable, "-m", __name__], {**os.environ, "TRITON_INTERPRET": "1"}
        _server = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert _server.stdin and _server.stdout
    with tempfile.NamedTemporaryFile("r", prefix="te_dynamo_interpreter_") as words:
        _server.stdin.write(json.dumps([words.name, file, *arguments]) + "\n")
        _server.stdin.flush()
        answer = _server.stdout.readline()
        assert answer == f"{words.name} 0\n", f"{file} {arguments}: {answer or 'its process ended'}\n{words.read()}"


_server: subprocess.Popen[str] | None = None
"""One for all: what test files import takes longer than most of them. It ends with this process, as its input does."""


def _serve() -> None:
    """Answers each line, which names a file for its words, a test file and its arguments, by the first and the exit code."""
    import te_dynamo.kernels.gemm.multiply  # what most of them import
    import te_dynamo.kernels.produce.produce  # noqa: F401

    make_quick()
    for line in sys.stdin:
        words, *sys.argv = json.loads(line)
        if (child := os.fork()) == 0:
            for stream in (1, 2):
                os.dup2(os.open(words, os.O_WRONLY | os.O_APPEND), stream)
            runpy.run_path(sys.argv[0], run_name="__main__")
            return
        print(words, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


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
    _serve()
