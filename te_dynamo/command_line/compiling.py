"""What the commands that compile a model share: options, and how a failure in the model is told."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from te_dynamo.command_line import target
from te_dynamo.command_line.failure import Failure, one_line
from te_dynamo.command_line.target import Subject
from te_dynamo.errors import InvalidOptionError, TeError
from te_dynamo.options import Options


def add(parser: argparse.ArgumentParser, device_help: str) -> None:
    """The arguments of a command that compiles a TARGET."""
    target.add(parser)
    parser.add_argument(
        "--recipe", help='name of a recipe (default: float8_current_scaling), "none" for the model\'s own precision'
    )
    parser.add_argument(
        "--rules",
        action="append",
        default=[],
        metavar="PATTERN=RECIPE",
        help='the recipe ("none" for none) of linears whose module path matches; the first that matches decides',
    )
    parser.add_argument("--mode", help='of torch.compile: "max-autotune"')
    parser.add_argument("--dynamic", action="store_true", help="sizes are symbols, as by torch.compile(dynamic=True)")
    parser.add_argument("--device", default="", help=device_help)
    parser.add_argument("--json", action="store_true", help="print plain data in place of tables")
    parser.add_argument("--debug", action="store_true", help="a failure has its traceback, and warnings are shown")


def options_of(parsed: argparse.Namespace, **more: Any) -> dict[str, Any]:
    """The options of torch.compile, checked, those of a mode among them. Raises Failure for a wrong one."""
    own: dict[str, Any] = {name: value for name, value in more.items() if value is not None}
    if parsed.recipe is not None:
        own["recipe"] = _recipe(parsed.recipe)
    if parsed.rules:
        own["rules"] = [_rule(text) for text in parsed.rules]
    try:
        checked = Options.parse(own, parsed.mode)
    except InvalidOptionError as error:
        raise Failure(one_line(error), status=2) from error
    return {**dict(checked.inductor), **own}


def _rule(text: str) -> tuple[str, str | None]:
    pattern, equals, recipe = text.rpartition("=")
    if not equals:
        raise Failure(f"--rules {text!r}: expected PATTERN=RECIPE, as lm_head=none", status=2)
    return pattern, _recipe(recipe)


def _recipe(name: str) -> str | None:
    return None if name.lower() == "none" else name


@contextlib.contextmanager
def compiling(subject: Subject, dynamic: bool) -> Iterator[None]:
    """Inside, the model is compiled. What it raises becomes a Failure, which says whether the model fails without te_dynamo too."""
    try:
        with torch._dynamo.config.patch(assume_static_by_default=False) if dynamic else contextlib.nullcontext():
            yield
    except (Exception, SystemExit) as error:
        alone = _fails_alone(subject)
        if alone is not None:
            raise Failure(f"the model itself fails on these inputs: {one_line(alone)}; give it others") from error
        hint = "" if isinstance(error, TeError) else "; --debug shows where"  # ours say what to do
        raise Failure(f"{one_line(error)}{hint}") from error


def _fails_alone(subject: Subject) -> BaseException | None:
    try:
        with torch.no_grad():
            subject.model(*subject.args, **subject.kwargs)
    except (Exception, SystemExit) as error:
        return error
    return None
