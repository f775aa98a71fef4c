"""What the commands print in a narrow terminal that knows no colours."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

MODEL = """
import torch

def make():
    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)), torch.randn(32, 64)
"""


def printed(arguments: list[str], columns: int, folder: Path) -> str:
    """What a command prints in a terminal of that width."""
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    env = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "FORCE_COLOR")}
    command = [sys.executable, "-m", "te_dynamo", *arguments]
    process = subprocess.Popen(command, stdin=its, stdout=its, stderr=its, cwd=folder, env={**env, "TERM": "dumb"})
    os.close(its)
    found = b""
    try:
        while read := os.read(ours, 65536):
            found += read
    except OSError:  # what Linux says at the end
        pass
    os.close(ours)
    assert process.wait() in (0, 1), found.decode()  # 1: doctor found something that is wrong with this machine
    return found.decode()


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments", [["explain", "models.py:make", "--device", "h200"], ["compare", "models.py:make"], ["doctor"]]
)
def test_a_dumb_terminal_of_40_columns(arguments: list[str], tmp_path: Path) -> None:
    (tmp_path / "models.py").write_text(MODEL)
    shown = printed(arguments, 40, tmp_path)
    assert "\x1b" not in shown and shown.isascii()
    assert "te-dynamo:" not in shown and len(shown.splitlines()) > 5
    assert max(map(len, shown.splitlines())) <= 40
