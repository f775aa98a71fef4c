"""lowering/inductor/output_names.py: the outputs' names are listed once while a graph's code is written, and anew for the next."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from torch._inductor.codegen.wrapper import PythonWrapperCodegen
from torch._inductor.virtualized import V

from te_dynamo.lowering.inductor.output_names import list_outputs_once


class Graph:
    def __init__(self) -> None:
        self.outputs = ["buf0", "buf7"]
        self.listed = 0

    def get_output_names(self) -> list[str]:
        self.listed += 1
        return list(self.outputs)


def generated(graph: Graph, fail: bool = False) -> list[list[str]]:
    def generate(is_inference: bool) -> list[list[str]]:
        if fail:
            raise ValueError("no code")
        return [V.graph.get_output_names() for _ in range(3)]

    with V.set_graph_handler(graph):  # type: ignore[arg-type]
        return PythonWrapperCodegen.generate(SimpleNamespace(_generate=generate), False)  # type: ignore[arg-type, return-value]


def test_names_are_listed_once_a_graph() -> None:
    list_outputs_once()
    graph = Graph()
    assert generated(graph) == [["buf0", "buf7"]] * 3 and graph.listed == 1
    graph.outputs.append("buf9")
    assert generated(graph)[0] == ["buf0", "buf7", "buf9"], "not those of the code before"
    assert graph.get_output_names() == ["buf0", "buf7", "buf9"] and graph.listed == 3


def test_an_error_leaves_the_graph_as_it_was() -> None:
    list_outputs_once()
    graph = Graph()
    with pytest.raises(ValueError, match="no code"):
        generated(graph, fail=True)
    graph.outputs.clear()
    assert graph.get_output_names() == []
