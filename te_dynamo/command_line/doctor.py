"""`te-dynamo doctor`: show versions, the device, and how each recipe runs here."""

from __future__ import annotations

import argparse

__all__ = ["add", "run"]


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--verbose", action="store_true", help="also list the private names of torch that are used")
    parser.add_argument("--debug", action="store_true", help="a failure has its traceback")


def run(parsed: argparse.Namespace) -> int:
    """Prints a Diagnosis. 1 for a broken installation."""
    from te_dynamo.command_line.diagnosis import diagnose

    diagnosis = diagnose()
    print(diagnosis.text(parsed.verbose))
    return diagnosis.exit_status
