"""TARGET: the model that a command looks at, and its inputs.

    package.module:factory     looked up from the current folder
    file.py:factory
    hf:CONFIG.json, hf:CLASS   a model of transformers, with random weights (hugging_face.py)

The factory takes no arguments and returns model, (model, args) or (model, args, kwargs). In its place may stand a module that is made already.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from te_dynamo.command_line import hugging_face
from te_dynamo.command_line.failure import Failure, one_line
from te_dynamo.command_line.inputs import inputs_of

_RETURNS = "a factory returns model, (model, args) or (model, args, kwargs)"


@dataclasses.dataclass
class Subject:
    """A model and what it is called with."""

    model: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def add(parser: argparse.ArgumentParser) -> None:
    """The arguments that say which model."""
    parser.add_argument(
        "target", metavar="TARGET", help="package.module:factory, file.py:factory, hf:CONFIG.json or hf:CLASS"
    )
    parser.add_argument(
        "--input",
        action="append",
        default=[],
        metavar="[NAME=]1x128:int64",
        help="an input by its size and dtype, random; once for each. In place of those that the factory returns",
    )


def load(parsed: argparse.Namespace, device: str) -> Subject:
    """The target with its inputs, on `device`, "" for where they are made. Raises Failure for what is none."""
    if parsed.target.startswith("hf:"):
        if not parsed.input:
            raise Failure(f"{parsed.target!r} has no inputs: give them by --input 1x128:int64", status=2)
        made: Any = hugging_face.build(parsed.target.removeprefix("hf:"), device)
    else:
        made = _made(parsed.target)
    subject = _subject(made, parsed.target, bool(parsed.input))
    if device and isinstance(subject.model, nn.Module):
        subject.model.to(device)
    if parsed.input:
        subject.args, subject.kwargs = inputs_of(parsed.input, subject.model, device)
    elif device:
        subject.args, subject.kwargs = _moved((subject.args, subject.kwargs), device)
    return subject


def _made(target: str) -> Any:
    """What the factory returns."""
    place, colon, name = target.rpartition(":")
    if not colon or not place or not name:
        raise Failure(
            f"{target!r} names no model: expected package.module:factory, file.py:factory or hf:CLASS", status=2
        )
    module = _from_file(place) if place.endswith(".py") else _from_name(place)
    try:
        found = getattr(module, name)
    except AttributeError as error:
        near = difflib.get_close_matches(name, [n for n in vars(module) if not n.startswith("_")], n=1)
        hint = f"did you mean {near[0]!r}?" if near else "name a function that makes the model"
        raise Failure(f"{target!r}: {place} has no {name!r}; {hint}", status=2) from error
    if isinstance(found, nn.Module):
        return found
    if not callable(found):
        raise Failure(f"{target!r}: expected a function, got {type(found).__name__}; {_RETURNS}", status=2)
    _check_takes_nothing(target, found)
    try:
        return found()
    except (Exception, SystemExit) as error:
        raise Failure(f"{target} raised {one_line(error)}; --debug shows where") from error


def _check_takes_nothing(target: str, factory: Callable[..., Any]) -> None:
    try:
        signature = inspect.signature(factory)
    except ValueError:  # a builtin without one: the call tells
        return
    try:
        signature.bind()
    except TypeError as error:
        raise Failure(
            f"{target!r} wants arguments {signature}: name a function that takes none and returns (model, args)",
            status=2,
        ) from error


def _from_file(path: str) -> ModuleType:
    if not os.path.isfile(path):
        raise Failure(f"there is no file {path!r}; the path is looked up from {os.getcwd()}", status=2)
    folder, name = os.path.dirname(os.path.abspath(path)), os.path.basename(path).removesuffix(".py")
    sys.path.insert(0, folder)  # as `python file.py` has it
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise Failure(f"{path} cannot be run: {_with_line(error)}; --debug shows where") from error
    return module


def _from_name(name: str) -> ModuleType:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` has it
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and f"{name}.".startswith(f"{error.name}."):
            raise Failure(f"there is no module {error.name!r}; for a file write file.py:factory", status=2) from error
        raise Failure(f"{name} cannot be imported: {one_line(error)}; --debug shows where") from error
    except (Exception, SystemExit) as error:
        raise Failure(f"{name} cannot be imported: {_with_line(error)}; --debug shows where") from error


def _with_line(error: BaseException) -> str:
    return f"line {error.lineno}, SyntaxError: {error.msg}" if isinstance(error, SyntaxError) else one_line(error)


def _subject(made: Any, target: str, has_inputs: bool) -> Subject:
    parts = list(made) if isinstance(made, (tuple, list)) else [made]
    if not parts or not callable(parts[0]) or len(parts) > 3:
        raise Failure(f"{target!r} returns {_described(made)}; {_RETURNS}", status=2)
    if len(parts) == 1 and not has_inputs:
        raise Failure(
            f"{target!r} has a model and no inputs: return (model, args), or give them by --input 1x128:int64", status=2
        )
    args = parts[1] if len(parts) > 1 else ()
    kwargs = parts[2] if len(parts) > 2 else {}
    if not isinstance(kwargs, dict):
        raise Failure(f"{target!r}: expected kwargs to be a dictionary, got {type(kwargs).__name__}", status=2)
    return Subject(parts[0], tuple(args) if isinstance(args, (tuple, list)) else (args,), kwargs)


def _described(made: Any) -> str:
    if isinstance(made, (tuple, list)):
        return f"({', '.join(type(part).__name__ for part in made)})"
    return type(made).__name__


def _moved(tree: Any, device: str) -> Any:
    from torch.utils._pytree import tree_map

    return tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, tree)
