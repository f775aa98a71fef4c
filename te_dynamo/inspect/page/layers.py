"""Which layers of a drawn graph are equal: of those the first is drawn, and one node stands for the rest."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

_LAYER = re.compile(r"(?:^|\.)\d+(?=\.|$)")


class Layers:
    """nodes: (node, path of its module, all else that must be equal) in the graph's order.

    A layer is what lies below a numbered module ("model.layers.3"). Two layers are equal where the nodes in them are, in order. Where the
    outer layers differ, the layers inside of each are compared.
    """

    def __init__(self, nodes: Sequence[tuple[Any, str, Any]]) -> None:
        self._group: dict[Any, str] = {}
        self._stands: dict[Any, str] = {}
        self._rest: list[tuple[str, str, int]] = []
        self._fold(nodes, 0)

    def group(self, node: Any) -> str:
        """The layer that a drawn node is in, "" where it is in none."""
        return self._group.get(node, "")

    def stands_for(self, node: Any) -> str | None:
        """The id of the node that `node` is drawn as; None where it is drawn itself."""
        return self._stands.get(node)

    def rest(self) -> list[tuple[str, str, int]]:
        """(id, label, how many nodes it stands for) of each node that stands for several layers."""
        return self._rest

    def _fold(self, nodes: Sequence[tuple[Any, str, Any]], depth: int) -> None:
        layers: dict[str, list[tuple[Any, str, Any]]] = defaultdict(list)
        for node in nodes:
            numbers = list(_LAYER.finditer(node[1]))
            if len(numbers) > depth:
                layers[node[1][: numbers[depth].end()]].append(node)
        equal: dict[Any, list[str]] = defaultdict(list)
        for path, members in layers.items():
            base = re.sub(r"\d+$", "", path)
            equal[base, tuple((module[len(path) :], what) for _, module, what in members)].append(path)
        for (base, _), paths in equal.items():
            first, *others = paths
            for node, _, _ in layers[first]:
                self._group[node] = first
            if others:
                self._stand_for(base, others, [node for path in others for node in layers[path]])
            self._fold(layers[first], depth + 1)

    def _stand_for(self, base: str, paths: list[str], nodes: list[tuple[Any, str, Any]]) -> None:
        name = f"layers{len(self._rest)}"
        numbers = sorted(int(path[len(base) :]) for path in paths)
        self._rest.append((name, f"{base.rstrip('.') or 'layers'} {', '.join(_ranges(numbers))}: alike", len(nodes)))
        self._stands.update((node, name) for node, _, _ in nodes)


def _ranges(numbers: list[int]) -> Iterator[str]:
    """ "1-30", "33"."""
    start = previous = numbers[0]
    for number in [*numbers[1:], -1]:
        if number != previous + 1:
            yield str(start) if start == previous else f"{start}-{previous}"
            start = number
        previous = number
