"""The command line: `python -m te_dynamo doctor` and `python -m te_dynamo explain module.path:callable`."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a subcommand. Returns 0, or 1 for a broken installation; exits with 2 for a wrong command line."""
    parser = _parser()
    parsed = parser.parse_args(arguments)
    if parsed.command == "doctor":
        return _doctor()
    try:
        make = _load(parsed.target)
    except ValueError as error:
        parser.error(str(error))
    return _explain(make, parsed)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m te_dynamo", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("doctor", help="versions, device, and how each recipe runs here")
    explain = commands.add_parser("explain", help="what the backend makes of a model, a row per linear")
    explain.add_argument("target", help="module.path:callable; the callable takes nothing and returns (model, args)")
    explain.add_argument("--recipe", help="name of a recipe (default: float8_current_scaling)")
    explain.add_argument(
        "--codegen",
        choices=("inductor", "eager"),
        help="eager skips code generation: faster, the same matches",
    )
    explain.add_argument("--html", metavar="FILE", help="also write the tables to an HTML page")
    return parser


def _doctor() -> int:
    from te_dynamo.inspect.doctor import diagnose

    diagnosis = diagnose()
    diagnosis.render(Console())
    return diagnosis.exit_status


def _explain(make: Any, parsed: argparse.Namespace) -> int:
    from te_dynamo.inspect.explain import explain

    model, args = make()
    given = {"recipe": parsed.recipe, "codegen": parsed.codegen}
    options = {name: value for name, value in given.items() if value is not None}
    explanation = explain(model, *(args if isinstance(args, tuple) else (args,)), options=options or None)
    print(explanation)
    if parsed.html:
        explanation.to_html(parsed.html)
    return 0


def _load(target: str) -> Any:
    """The callable that "module.path:name" names, looked up from the current folder as `python -m` does."""
    module_name, colon, name = target.partition(":")
    if not colon or not name:
        raise ValueError(f"{target!r}: expected module.path:callable")
    try:
        found = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{target!r}: {error}") from error
    if not callable(found):
        raise ValueError(f"{target!r} is no callable")
    return found


if __name__ == "__main__":
    sys.exit(main())
