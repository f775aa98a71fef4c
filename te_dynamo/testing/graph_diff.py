"""`graph_diff`: what differs between two graphs, such as one with a fusion and one without."""

from __future__ import annotations

import difflib
import re
from collections.abc import Container, Iterator, Sequence

from torch import fx

from te_dynamo.inspect.graphs.graph_text import graph_text

Graph = str | fx.Graph | fx.GraphModule

_NAME = re.compile(r"^ *(?!return )([\w.]+)(?=[:\[]| = )")
"""What a statement calls its result. An input that the forward graph saved is called quantize[1]: its name is quantize."""


def graph_diff(before: Graph, after: Graph, context: int = 3) -> str:
    """The unified difference of two graphs' texts; "" where they are equal.

    before, after: graphs, or their texts, such as `graphs["forward"]` of te_dynamo.capture.
    context:       how many equal statements are shown around each change.

    graph_text numbers values by operation, so one quantize less renames all that follow. Here a statement of `after` that stands
    for one of `before` has its name, and a new one has a name that `before` lacks.
    """
    old, new = _lines(before), _lines(after)
    new = _renamed(new, _new_names(old, new))
    return "\n".join(difflib.unified_diff(old, new, "before", "after", lineterm="", n=context))


def _lines(graph: Graph) -> list[str]:
    return (graph if isinstance(graph, str) else graph_text(graph)).splitlines()


def _new_names(old: Sequence[str], new: Sequence[str]) -> dict[str, str]:
    """The names of `new` -> what they are called in the difference."""
    paired: dict[str, str] = {}
    for of_old, of_new in _pairs(old, new):
        name, called = _name(of_new), _name(of_old)
        if name and called and name not in paired and called not in paired.values():
            paired[name] = called
    taken = {*paired.values(), *filter(None, map(_name, old))}
    for name in filter(None, map(_name, new)):
        if name not in paired:
            paired[name] = _free(name, taken)
            taken.add(paired[name])
    return paired


def _pairs(old: Sequence[str], new: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Statements that stand for each other: equal but for numbers in names; between these the same operation with the same result."""
    keys = _without_numbers(old), _without_numbers(new)
    for tag, i, i_end, j, j_end in difflib.SequenceMatcher(None, keys[0], keys[1], autojunk=False).get_opcodes():
        if tag == "equal":
            yield from zip(old[i:i_end], new[j:j_end], strict=True)
        elif tag == "replace":
            results = [[line.partition(" = ")[0] for line in lines] for lines in (keys[0][i:i_end], keys[1][j:j_end])]
            for start, there, size in difflib.SequenceMatcher(
                None, results[0], results[1], autojunk=False
            ).get_matching_blocks():
                yield from zip(old[i + start : i + start + size], new[j + there : j + there + size], strict=True)


def _free(name: str, taken: Container[str]) -> str:
    base, number, free = _base(name), 0, name
    while free in taken:
        number += 1
        free = f"{base}_{number}"
    return free


def _without_numbers(lines: Sequence[str]) -> list[str]:
    """Statements that are the same but for the numbers in names become equal."""
    return _renamed(lines, {name: _base(name) for name in filter(None, map(_name, lines))})


def _renamed(lines: Sequence[str], names: dict[str, str]) -> list[str]:
    """A name counts where it stands by itself: neither a part of a longer one nor of an operation's (te.quantize)."""
    return [re.sub(r"(?<![\w.])[\w.]+(?![\w.(])", lambda found: names.get(found[0], found[0]), line) for line in lines]


def _name(line: str) -> str | None:
    found = _NAME.match(line)
    return found[1] if found else None


def _base(name: str) -> str:
    return re.sub(r"_\d+$", "", name)
