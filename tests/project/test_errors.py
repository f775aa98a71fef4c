"""te_dynamo.errors: one class for each kind of mistake, all in one place."""

from __future__ import annotations

import ast
import functools
import pathlib

import pytest

from te_dynamo import errors

ROOT = pathlib.Path(__file__).parents[2]
CLASSES = [getattr(errors, name) for name in errors.__all__]


@functools.cache
def called() -> set[str]:
    """What the package calls, by the first part of its name."""
    return {
        ast.unparse(node.func).partition(".")[0]
        for folder in ("te_dynamo", "passes", "lowering", "kernels")
        for file in (ROOT / folder).rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call)
    }


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_each_says_what_it_is_and_is_raised_somewhere(cls: type[Exception]) -> None:
    assert issubclass(cls, errors.TeError) and cls.__doc__
    assert (cls.__name__ in called()) == (cls is not errors.TeError)


def test_there_are_no_others() -> None:
    """A class of errors that a user may meet is where users look for it."""
    import te_dynamo.backend  # noqa: F401, the whole package

    def below(cls: type) -> set[type]:
        return {cls}.union(*map(below, cls.__subclasses__()))

    assert below(errors.TeError) == set(CLASSES)
