"""The command `te-dynamo`: what it takes, and how it fails.

A command is a file of this folder with `add` (its arguments) and `run` (its work, which returns the exit code). Its file imports torch, so
it is imported for that command alone: --help, --version and a mistyped command answer at once.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import NoReturn

import te_dynamo
from te_dynamo.command_line.failure import Failure

__all__ = ["main"]

_COMMANDS = {
    "explain": "show which layers run in FP8, and why the others do not",
    "compare": "measure what each linear's recipe costs in accuracy",
    "bench": "measure the time and memory of a model with te_dynamo and without, on this GPU",
    "calibrate": "benchmark this GPU and save the result for the cost model",
    "doctor": "show versions, the device, and how each recipe runs here",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command. Returns 0, 1 for what went wrong in the model or the installation, or 2 for a wrong command line.

    A failure is one line on stderr; with --debug its traceback stands before it.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    debug = "--debug" in arguments
    try:
        parsed = _parser(arguments).parse_args(arguments)
        with contextlib.nullcontext() if debug else _quiet():
            status: int = parsed.run(parsed)
            return status
    except Failure as failure:
        if debug:
            traceback.print_exc()
        print(f"te-dynamo: {failure}", file=sys.stderr)
        return failure.status


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise Failure(f"{message}; {self.prog} --help lists what there is", status=2)


def _parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    """Of all commands, with the arguments of the one that `arguments` name."""
    parser = _Parser(prog="te-dynamo", description="FP8, MXFP8 and NVFP4 for PyTorch models, through torch.compile.")
    parser.add_argument("--version", action="version", version=f"te-dynamo {te_dynamo.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, summary in _COMMANDS.items():
        subparser = commands.add_parser(name, help=summary, description=summary)
        if name in arguments[:1]:
            command = import_module(f"te_dynamo.command_line.{name}")
            subparser.set_defaults(run=command.run)
            command.add(subparser)
    return parser


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
