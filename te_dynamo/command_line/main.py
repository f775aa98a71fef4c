"""The command `te-dynamo`: what it takes, and how it fails.

A command is a file of this folder with `add` (its arguments) and `run` (its work, which returns the exit code). Its file imports torch, so
it is imported for that command alone: --help, --version and a mistyped command answer at once.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import difflib
import gc
import io
import logging
import os
import re
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import te_dynamo
from te_dynamo.command_line.failure import Failure, one_line
from te_dynamo.errors import InvalidOptionError

_COMMANDS = ("explain", "compare", "bench", "generate", "calibrate", "doctor")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command. Returns 0, 1 for what went wrong in the model or the installation, or 2 for a wrong command line.

    A failure is one line on stderr; with --debug its traceback stands before it.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    debug = "--debug" in arguments
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a module's name may have letters that the terminal has not
    gc.set_threshold(
        50_000, 20, 20
    )  # what is imported and traced lives on: looking through it took a tenth of the time
    try:
        parsed = _parser(arguments).parse_args(arguments)
        with contextlib.nullcontext() if debug else _quiet():
            status: int = parsed.run(parsed)
        print(end="", flush=True)  # here, so that a failure to write is reported
        return status
    except BrokenPipeError:  # `| head` has read enough
        _drop_what_cannot_be_written()
        return 1
    except KeyboardInterrupt:
        return 130  # what a shell says of Ctrl-C
    except (Failure, OSError) as failure:  # OSError: of printing or the page, as of a full disk
        if debug:
            traceback.print_exc()
        print(f"te-dynamo: {failure if isinstance(failure, Failure) else one_line(failure)}", file=sys.stderr)
        _drop_what_cannot_be_written()
        return getattr(failure, "status", 1)


def _drop_what_cannot_be_written() -> None:
    """Python would try it again when it ends."""
    try:
        print(end="", flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise Failure(f"{message}; {self.prog} --help lists what there is", status=2)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Names the command, and the option that is near, of what no option is: argparse itself has neither."""
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            options = re.findall(r"--[\w-]+", parsed.command.format_help())
            near = difflib.get_close_matches(unknown[0].partition("=")[0], options, n=1)
            hint = f", did you mean {near[0]}?" if near else ""
            parsed.command.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return parsed


def _parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    """Of all commands, with the arguments of the one that `arguments` name."""
    parser = _Parser(prog="te-dynamo", description="FP8, MXFP8 and NVFP4 for PyTorch models, through torch.compile.")
    parser.add_argument("--version", action="version", version=f"te-dynamo {te_dynamo.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    if arguments and arguments[0] not in ("-h", "--help", "--version", *_COMMANDS):
        raise Failure(one_line(InvalidOptionError.unknown("command", arguments[0], _COMMANDS)), status=2)
    for name in _COMMANDS:
        summary = _summary(name)
        subparser = commands.add_parser(name, help=summary, description=summary)
        if name in arguments[:1]:
            command = import_module(f"te_dynamo.command_line.{name}")
            subparser.set_defaults(run=command.run, command=subparser)
            command.add(subparser)
    return parser


def _summary(command: str) -> str:
    """What the docstring of a command's file says behind its name."""
    source = Path(__file__).with_name(f"{command}.py").read_text(encoding="utf-8")
    return (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0].partition(": ")[2].rstrip(".")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Warnings and torch's logs stay out of a command's output: ours are notes in its report. TORCH_LOGS asks for the logs."""
    disabled = logging.root.manager.disable
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if not os.environ.get("TORCH_LOGS"):
            logging.disable(logging.ERROR)
        try:
            yield
        finally:
            logging.disable(disabled)
