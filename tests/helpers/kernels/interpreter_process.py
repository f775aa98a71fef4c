"""A test file run as a program, in a process whose kernels run in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys


def run_in_interpreter(file: str, *arguments: str) -> None:
    """Runs `python file arguments...`. Triton reads TRITON_INTERPRET where it is imported, so a process that has kernels is too late."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    result = subprocess.run([sys.executable, file, *arguments], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
