"""Patterns of rules: regular expressions on module paths, in which a slice between braces is a place in a list of modules.

A list is what a module's children with numbers for names are: those of nn.ModuleList and nn.Sequential. `{0}` is its first module, `{-4:}` are
the last four, `{-15%:}` the last 15%, rounded up to whole modules. `layers.{-15%:}.mlp` becomes a plain regular expression once the lists of
the model are known.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from fractions import Fraction

from te_dynamo.errors import InvalidOptionError

Lists = tuple[tuple[str, tuple[str, ...]], ...]
"""(a module's path, its children's numbers in order) of each list in a model."""

_BRACES = re.compile(r"(?<!\\)\{([^{}]*)\}")
_COUNT = re.compile(r"\d+|\d*,\d*")
"""What braces hold in a regular expression: how often it repeats what is before them."""

_BOUND = r"-?\d+(?:\.\d+)?%|-?\d+"
_PLACE = re.compile(rf"({_BOUND})?(:({_BOUND})?(?::(-?[1-9]\d*)?)?)?")


def check(pattern: str) -> None:
    """Raises InvalidOptionError for a pattern that is no regular expression, or has braces that hold neither a place nor a count."""
    for braces in filter(_is_place, _BRACES.finditer(pattern)):
        if why := _wrong(braces[1]):
            raise InvalidOptionError(
                f"te_dynamo: {braces[0]!r} in {pattern!r} is no place in a list of modules: {why}; expected a number or a slice of numbers or "
                "percentages, as {0}, {:2}, {-4:} or {-15%:}"
            )
    try:
        re.compile(expression(pattern))
    except re.error as error:
        raise InvalidOptionError(f"te_dynamo: {pattern!r} is not a regular expression: {error}") from None


def has_places(pattern: str) -> bool:
    """Whether what it takes depends on the lengths of the model's lists."""
    return any(map(_is_place, _BRACES.finditer(pattern)))


def expression(pattern: str, lists: Lists = ()) -> str:
    """The regular expression that a pattern is in a model with these lists."""
    return _BRACES.sub(lambda braces: _numbers(braces[1], lists) if _is_place(braces) else braces[0], pattern)


def lists_of(paths: Iterable[str]) -> Lists:
    """The lists in a model, by the paths of all its modules and parameters."""
    found: dict[str, set[str]] = {}
    for path in paths:
        parent, _, name = path.rpartition(".")
        if name.isdecimal():
            found.setdefault(parent, set()).add(name)
    return tuple((parent, tuple(sorted(numbers, key=int))) for parent, numbers in found.items())


def taken(regex: str, paths: Iterable[str]) -> list[str]:
    """The modules of lists in which the expression of a pattern with places finds its modules among `paths`."""
    found: dict[str, None] = {}
    for path in paths:
        parents = (path[: dot.start()] for dot in re.finditer(r"\.", path))
        if re.search(regex, path) and not any(re.search(regex, parent) for parent in parents):
            numbered = re.match(r"(.*\.)?\d+(?![^.])", path)
            found[numbered[0] if numbered else path] = None
    return list(found)


def _is_place(braces: re.Match[str]) -> bool:
    """Not so a count. A number alone is a place where it is all of a path's component."""
    before, behind = braces.string[: braces.start()], braces.string[braces.end() :]
    whole = re.search(r"(^|[.^(|])$", before) and re.match(r"$|\\?\.|[$)|]", behind)
    return not _COUNT.fullmatch(braces[1]) or bool(whole and braces[1].isdecimal())


def _wrong(place: str) -> str:
    """What is wrong with the text of a place, "" if nothing is."""
    parts = _PLACE.fullmatch(place)
    if not parts or not place:
        return "it is no slice"
    if not parts[2] and "%" in place:
        return "a percentage alone is no module"
    for bound in filter(None, parts.group(1, 3)):
        size = Fraction(bound.strip("-%"))
        if bound.endswith("%") and size > 100:
            return f"{bound} is more than all"
        if bound.startswith("-") and not size:
            return f"Python reads {bound} as 0, the start of the list"
    return ""


def _chosen(place: str, numbers: tuple[str, ...]) -> Iterator[str]:
    """Those of a list's numbers that are in a place."""

    def index(bound: str | None) -> int | None:
        if bound is None or not bound.endswith("%"):
            return None if bound is None else int(bound)
        size = math.ceil(Fraction(bound.strip("-%")) * len(numbers) / 100)
        return -size if bound.startswith("-") else size

    parts = _PLACE.fullmatch(place)
    assert parts
    start, stop, step = index(parts[1]), index(parts[3]), index(parts[4])
    if parts[2]:
        yield from numbers[start:stop:step]
    elif start is not None and -len(numbers) <= start < len(numbers):
        yield numbers[start]


def _numbers(place: str, lists: Lists) -> str:
    """A regular expression of those components of paths that are in a place."""
    each = ((re.escape(f"{parent}." if parent else ""), "|".join(_chosen(place, numbers))) for parent, numbers in lists)
    found = "|".join(f"(?<=^{parent})(?:{chosen})" for parent, chosen in each if chosen)
    return rf"(?<![^.])(?:{found or '(?!)'})(?![^.])"
