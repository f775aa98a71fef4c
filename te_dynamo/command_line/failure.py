"""How a command fails: one line that says what is wrong and how to mend it."""

from __future__ import annotations

import os
import re

from te_dynamo.errors import TeError


class Failure(Exception):
    """What ends a command. status: its exit code, 2 for a wrong command line, 1 for what went wrong in the model."""

    def __init__(self, message: str, status: int = 1) -> None:
        super().__init__(message)
        self.status = status


def one_line(error: BaseException) -> str:
    """The first line that an exception says, with its class but for ours; of one that torch wrapped, the exception in it."""
    error = getattr(error, "inner_exception", error)
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    if isinstance(error, TeError):
        return re.sub(r"^te_dynamo(\.\w+)*: ", "", text)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def check_writable(path: str) -> None:
    """Raises Failure where `path` cannot be written: that is found before minutes of compiling."""
    is_new = not os.path.lexists(path)
    try:
        with open(path, "ab"):
            pass
    except OSError as error:
        raise Failure(f"cannot write {path!r}: {error.strerror}; name another file", status=2) from error
    if is_new:
        os.remove(path)
