"""The captured graphs as nodes and arrows to draw.

    te operations, products in the user's precision, inputs that several read, what is returned    a node each
    all other operations of a module that touch each other                                         one node
    layers that are equal                                                                          the first, and one node for the rest

An input is drawn where an operation reads nothing else; elsewhere, and of parameters always, the line of the reader names it. A drawn node has: id, label, kind, group (the layer that
it is in, ""), module, source, type (dtype and shape of its result), lines (of the graph's text), runs, and bytes.
"""

from __future__ import annotations

import operator
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import fx

from te_dynamo.inspect.graphs.capture import Captured
from te_dynamo.inspect.graphs.graph_text import statements
from te_dynamo.inspect.page.layers import Layers
from te_dynamo.inspect.target import tensors_in
from te_dynamo.user_code import module_here, source_line

_PRODUCTS = {"linear", "matmul", "mm", "addmm", "bmm", "baddbmm", "convolution", "einsum", "conv2d", "conv1d"}
_DRAWN = {"te", "product", "attention"}


def stages_to_draw(captured: Captured, lowered: Mapping[tuple[str, str], str]) -> list[dict[str, Any]]:
    """For each stage and each Dynamo graph that has it: {"stage", "graph", "before", "after"}; before is None where there is none.

    lowered: (phase, te operation) -> what runs it.
    """
    drawn = []
    for stage in captured.stages:
        phase = stage.removeprefix("lower.")
        runs = {op: text for (of, op), text in lowered.items() if of == phase}
        for index in range(len(captured.all(stage))):
            origins = _origins_by_number(captured, index)
            before = captured.before(stage, index)
            after = _Drawing(captured.graph(stage, index), origins, runs)
            old = None if before is None else _Drawing(before, origins, {})
            made = after.operations - (old.operations if old else after.operations)
            drawn.append(
                {
                    "stage": stage,
                    "graph": index,
                    "before": old and old.to_dict(set()),
                    "after": after.to_dict(made if stage != "match" else set()),
                }
            )
    return drawn


def te_bytes(graph: fx.Graph) -> tuple[int, int]:
    """(te operations of a graph, bytes of all tensors that they read and write)"""
    nodes = [node for node in graph.nodes if _operation(node).startswith("te.")]
    return len(nodes), sum(_bytes([node, *node.all_input_nodes]) for node in nodes)


class _Drawing:
    """One graph. `operations`: the te operations in it."""

    def __init__(self, graph: fx.Graph, origins: Mapping[int, tuple[str, str]], runs: Mapping[str, str]) -> None:
        self._origins = origins
        self._runs = runs
        self._lines = statements(graph)
        self._modules = _modules(graph, origins)
        self._kinds = {node: self._kind(node) for node in self._lines}
        self.operations = {_operation(node) for node in self._lines} - {""}
        self._of: dict[fx.Node, fx.Node] = {}  # node -> the one that it is drawn with
        self._join_neighbours()

    def to_dict(self, made: set[str]) -> dict[str, Any]:
        """made: the operations that are new in this graph."""
        members: dict[fx.Node, list[fx.Node]] = defaultdict(list)
        for node in self._lines:
            members[self._root(node)].append(node)
        edges = {
            (self._root(read), root)
            for root, nodes in members.items()
            for node in nodes
            for read in map(_whole, node.all_input_nodes)
            if read in self._lines and self._root(read) is not root
        }
        layers = Layers(
            [
                (root, self._modules[root], self._signature(nodes))
                for root, nodes in members.items()
                if self._modules[root]
            ]
        )
        hidden = self._named_by_their_readers({(a, b) for a, b in edges if layers.stands_for(b) is None})
        ids = {root: layers.stands_for(root) or f"n{i}" for i, root in enumerate(members)}
        nodes = [
            {"id": ids[root], "group": layers.group(root), **self._described(nodes, made)}
            for root, nodes in members.items()
            if layers.stands_for(root) is None and root not in hidden
        ]
        nodes += [
            {"id": name, "label": f"{label}\n{count} operations", "kind": "layers", "group": "", "lines": []}
            for name, label, count in layers.rest()
        ]
        arrows = {(ids[a], ids[b]) for a, b in edges if a not in hidden and ids[a] != ids[b]}
        returned = {ids[root] for root in members if self._kinds[root] == "output"}
        read = {a for a, b in arrows if b not in returned}
        # A forward graph returns all that backward reads: arrows from what other operations read would hide the rest.
        shown = sorted(f"{a} {b}" for a, b in arrows if b not in returned or a not in read)
        operations = sum(kind not in ("input", "output") for kind in self._kinds.values())
        return {"nodes": nodes, "edges": shown, "operations": operations}

    def _kind(self, node: fx.Node) -> str:
        operation = _operation(node)
        if node.op in ("placeholder", "output"):
            return "input" if node.op == "placeholder" else "output"
        if operation.startswith("te.") or operation.startswith("triton."):
            return "te"
        last = operation.rpartition(".")[2]
        if last in _PRODUCTS:
            return "product"
        return "attention" if "scaled_dot_product" in last or "flash" in last else "other"

    def _join_neighbours(self) -> None:
        """Other operations of a part of the model that touch each other become one node, unless what is drawn lies between two of them."""
        drawn_before: dict[fx.Node, int] = {}
        for node in self._lines:
            self._of[node] = node
            reads = [read for read in map(_whole, node.all_input_nodes) if read in self._lines]
            drawn_before[node] = max((drawn_before[r] + (self._kinds[r] in _DRAWN) for r in reads), default=0)
            for read in reads if self._kinds[node] == "other" else ():
                alike = self._kinds[read] == "other" and _part(self._modules[read]) == _part(self._modules[node])
                if alike and drawn_before[read] == drawn_before[node]:
                    first, second = sorted((self._root(read), self._root(node)))
                    self._of[second] = first

    def _root(self, node: fx.Node) -> fx.Node:
        while self._of[node] is not node:
            self._of[node] = self._of[self._of[node]]
            node = self._of[node]
        return node

    def _signature(self, nodes: Iterable[fx.Node]) -> Any:
        return tuple((_operation(node), _type(*self._lines[node])) for node in nodes)

    def _named_by_their_readers(self, edges: set[tuple[fx.Node, fx.Node]]) -> set[fx.Node]:
        """The inputs that need no node: parameters, and those whose readers all read an operation too. edges: those to drawn nodes."""
        inputs = {node for node in self._lines if self._kinds[node] == "input"}
        after_operations = {reader for read, reader in edges if read not in inputs}
        first = {read for read, reader in edges if reader not in after_operations}
        return {node for node in inputs if node not in first or self._is_parameter(node)}

    def _is_parameter(self, node: fx.Node) -> bool:
        """Whether it has a path ("fc1.weight"), as no input of the user's and no saved value has."""
        return self._kinds.get(node) == "input" and "." in self._lines[node][0]

    def _described(self, nodes: list[fx.Node], made: set[str]) -> dict[str, Any]:
        first, operation = nodes[0], _operation(nodes[0])
        module, kind = self._modules[first], self._kinds[first]
        name, line = self._lines[first]
        weights = [self._lines[read][0] for read in first.all_input_nodes if self._is_parameter(read)]
        below = (
            _short(weights[0]) if kind == "te" and len(weights) == len(first.all_input_nodes) == 1 else _short(module)
        )
        if kind == "other" and len(nodes) > 1:
            common = ", ".join(
                name for name, _ in Counter(_operation(n).rpartition(".")[2] for n in nodes).most_common(3)
            )
            title = f"{len(nodes)} operations: {common}"
        elif kind == "output":
            title = "return"
        else:
            title = operation or name
        return {
            "label": f"{title}\n{below}" if below and kind != "input" else title,
            "kind": "fused" if operation in made and kind == "te" else kind,
            "module": module,
            "source": source_line(first) or _origin(first, self._origins)[1],
            "type": _type(name, line) if len(nodes) == 1 else "",
            "lines": [self._lines[node][1] for node in nodes],
            "runs": self._runs.get(operation, ""),
            "bytes": _bytes([first, *first.all_input_nodes]) if kind in ("te", "product") else 0,
        }


def _origins_by_number(captured: Captured, index: int) -> dict[int, tuple[str, str]]:
    """Autograd's number of an operation -> (the module whose forward ran it, the user's line): a backward node has the number alone."""
    found: dict[int, tuple[str, str]] = {}
    for stage in ("joint", "forward", "inference"):
        if stage in captured and index < len(captured.all(stage)):
            for graph in (captured.before(stage, index), captured.graph(stage, index)):
                for node in graph.nodes if graph is not None else ():
                    if (module := module_here(node)) and "seq_nr" in node.meta and "autograd_backward" not in node.meta:
                        found.setdefault(node.meta["seq_nr"], (module, source_line(node)))
    return found


def _modules(graph: fx.Graph, origins: Mapping[int, tuple[str, str]]) -> dict[fx.Node, str]:
    """The module of each operation; of one that says nothing, and of a sum of gradients, that of what it reads."""
    found: dict[fx.Node, str] = {}
    for node in graph.nodes:
        is_sum = (
            "autograd_backward" in node.meta and node.target is torch.ops.aten.add.Tensor
        )  # made outside of any operation
        module = "" if is_sum else module_here(node) or _origin(node, origins)[0]
        found[node] = module or next((found[read] for read in reversed(node.all_input_nodes) if found.get(read)), "")
    return {node: "" if node.op in ("placeholder", "output") else module for node, module in found.items()}


def _origin(node: fx.Node, origins: Mapping[int, tuple[str, str]]) -> tuple[str, str]:
    return origins.get(node.meta.get("seq_nr", -1), ("", ""))


def _whole(node: fx.Node) -> fx.Node:
    """The operation whose result `node` takes one part of."""
    while (
        node.op == "call_function"
        and node.target is operator.getitem
        and isinstance(node.args[1], int)
        and isinstance(node.args[0], fx.Node)
    ):
        node = node.args[0]
    return node


def _operation(node: fx.Node) -> str:
    """ "te.gemm", "aten.view", "F.gelu", "view"; "" for an input and for the output."""
    if node.op in ("placeholder", "output"):
        return ""
    if node.op != "call_function":  # a constant's name has a number of its own
        return "attribute" if node.op == "get_attr" else str(node.target)
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.name.replace("::", ".")
    return str(getattr(node.target, "__name__", node.target))


def _type(name: str, line: str) -> str:
    """ "bf16[8, 64]" of the line "x: bf16[8, 64] = input"."""
    found = re.match(r": (.*?) = ", line[len(name) :]) if line.startswith(name) else None
    return found.group(1) if found else ""


def _part(module: str) -> str:
    """ "layers.0.self_attn" of "layers.0.self_attn.q_proj": what is one level below a layer."""
    found = re.match(r"(.*\.\d+\.[^.]+)", module)
    return found.group(1) if found else module


def _short(module: str) -> str:
    """The last two parts of a path."""
    return ".".join(module.split(".")[-2:])


def _bytes(nodes: Iterable[fx.Node]) -> int:
    values = [node.meta.get("val", node.meta.get("example_value")) for node in dict.fromkeys(nodes)]
    return sum(
        t.numel() * t.element_size() for t in tensors_in(values) if all(isinstance(size, int) for size in t.shape)
    )
