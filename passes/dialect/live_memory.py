"""What is alive at each kernel of a lowered graph, counted from the graph: a step's peak without a GPU.

Kernels are launches, te operations, torch's products, attention and collectives. What Inductor writes itself is one kernel where it shares
what it reads. It writes a result into the memory of an argument that is read for the last time there, if the graph made that
argument and both have as many bytes. Other results count where a kernel reads them or the graph returns them.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.utils._pytree import tree_leaves

from te_dynamo.dialect.define import is_te
from te_dynamo.dialect.gated import gated_backward, gated_backward_quantize, gated_backward_quantize_halves
from te_dynamo.dialect.memory import byte_hint, is_product

_CALLERS = ("primals", "tangents")
"""Inputs that the caller keeps: parameters, the model's input, the gradient of its output."""


def peak_bytes(graph: Graph) -> int:
    """The most that is alive at once, beside what the caller keeps."""
    return max((alive for _, alive in timeline(graph)), default=0)


def saved_bytes(graph: Graph) -> int:
    """What a backward graph takes of forward, beside what the caller keeps."""
    return sum(map(_bytes, _taken(graph)))


def timeline(graph: Graph) -> Iterator[tuple[Node, int]]:
    """(kernel, bytes alive while it runs), in the order of the graph. Its time is linear in the graph."""
    steps = _steps(graph)
    last = {owner: index for index, step in enumerate(steps) for owner in (*step.reads, *step.writes)}
    alive = {node: _bytes(node) for node in _taken(graph) if node in last}
    ends: dict[int, list[Node]] = {}
    for owner, index in last.items():
        ends.setdefault(index, []).append(owner)
    total = sum(alive.values())
    for index, step in enumerate(steps[:-1]):
        alive |= (made := {owner: _bytes_of_result(owner) for owner in step.writes})
        total += sum(made.values())
        dying = [owner for owner in ends.get(index, ()) if owner in alive]
        if not _is_empty(step.node):
            yield step.node, total - _reused(step, set(dying), alive)
        total -= sum(alive.pop(owner) for owner in dying)


def _reused(step: _Step, dying: set[Node], alive: dict[Node, int]) -> int:
    """Bytes of the step's results that lie in arguments that end with it."""
    free = [alive[owner] for owner in dying & step.overwritten if owner.op != "placeholder"]
    reused = 0
    for size in map(_bytes_of_result, step.writes):
        if size in free:
            free.remove(size)
            reused += size
    return reused


@dataclasses.dataclass
class _Step:
    """One kernel: whose memory it reads, what it allocates, and whose memory a result of as many bytes takes where that ends with it."""

    node: Node
    reads: set[Node]
    writes: list[Node]
    overwritten: set[Node] = dataclasses.field(default_factory=set)
    is_inductors: bool = False


def _steps(graph: Graph) -> _Steps:
    """The last is the output."""
    owners, steps = _owners(graph), _Steps()
    for node in graph.nodes:
        reads = set().union(*(owners[read] for read in node.all_input_nodes))
        if node.op == "output" or is_kernel(node):
            steps.append(_Step(node, reads, _results(node), owners[node.args[0]] if _overwrites_dy(node) else set()))  # type: ignore[index]
        elif _is_empty(node):
            steps.append(_Step(node, set(), [node]))
        elif node.op == "call_function" and owners[node] == {node} and node not in steps.made:
            steps.add_inductors(_Step(node, reads, [node], reads, is_inductors=True))
    return steps


def _overwrites_dy(node: Node) -> bool:
    """Whether lowering may write a result over dy (lowering/in_place.py)."""
    quantizes = node.target in (gated_backward_quantize, gated_backward_quantize_halves)
    return node.target is gated_backward or (quantizes and node.args[4].one_scale)  # type: ignore[union-attr]


class _Steps(list[_Step]):
    """The kernels in their order."""

    def __init__(self) -> None:
        self.made: dict[Node, int] = {}  # at which step
        self._inductors: dict[Node, list[int]] = {}  # the kernels of Inductor's that read or write it

    def append(self, step: _Step) -> None:
        super().append(step)
        self._note(step, len(self) - 1)

    def add_inductors(self, step: _Step) -> None:
        """Puts a result of Inductor's into the first of its kernels that shares what it reads, and finds that made; else into its own."""
        ready = max((self.made.get(owner, -1) for owner in step.reads), default=-1)
        sharing = {i for owner in step.reads for i in self._inductors.get(owner, ()) if i >= ready}
        if not sharing:
            self.append(step)
            return
        kernel = self[min(sharing)]
        kernel.reads |= step.reads - set(kernel.writes)  # `overwritten` too
        kernel.writes += step.writes
        self._note(step, min(sharing))

    def _note(self, step: _Step, index: int) -> None:
        self.made |= dict.fromkeys(step.writes, index)
        if step.is_inductors:
            for owner in (*step.reads, *step.writes):
                self._inductors.setdefault(owner, []).append(index)


def _owners(graph: Graph) -> dict[Node, set[Node]]:
    """Whose memory a node's value lies in or is computed from: its own where it is written, else what it reads."""
    owners: dict[Node, set[Node]] = {}
    items: dict[tuple[Node, Any], Node] = {}
    for node in graph.nodes:
        source: Any = node.args[0] if node.target is operator.getitem else None
        if source is not None and _is_launch(source):
            owners[node] = owners[source.kwargs["kwargs"][node.args[1]]]
        elif source is not None and is_kernel(source):
            owners[node] = {items.setdefault((source, node.args[1]), node)}
        elif node.op == "placeholder" or is_kernel(node) or _is_empty(node) or _leaves_its_kernel(node):
            owners[node] = {node}
        else:
            owners[node] = set().union(*(owners[read] for read in node.all_input_nodes))
    return owners


def _results(node: Node) -> list[Node]:
    """What a kernel allocates: the first reader of each of its items, and itself for those that nobody reads."""
    if node.op == "output" or _is_launch(node):
        return []
    items = {user.args[1]: user for user in reversed(node.users) if user.target is operator.getitem}
    return [node, *items.values()]


def _bytes_of_result(node: Node) -> int:
    items = {user.args[1]: user for user in node.users if user.target is operator.getitem} if is_kernel(node) else {}
    return max(_bytes(node) - sum(map(_bytes, items.values())), 0)


def _taken(graph: Graph) -> list[Node]:
    return [node for node in graph.find_nodes(op="placeholder") if not node.name.startswith(_CALLERS)]


def _leaves_its_kernel(node: Node) -> bool:
    """Whether a kernel reads what Inductor computes there, or the graph returns it."""
    return not _is_view(node) and any(reader.op == "output" or is_kernel(reader) for reader in _readers(node))


def _readers(node: Node) -> Iterator[Node]:
    for user in node.users:
        yield from _readers(user) if _is_view(user) else (user,)


def _is_empty(node: Node) -> bool:
    return node.target is torch.ops.aten.empty.memory_format


def is_kernel(node: Any) -> bool:
    """Whether Inductor does not write what computes a node: a launch, a te operation, a product, a collective or attention, with its random
    state or not."""
    by_name = "scaled_dot_product" in str(node.target) or ("c10d_functional" in str(node.target) and not _is_wait(node))
    is_higher = isinstance(node.target, torch._ops.HigherOrderOperator)
    return is_higher or is_te(node.target) or is_product(node) or by_name


def _is_wait(node: Any) -> bool:
    """Of a collective, whose result it gives."""
    return str(node.target) == "_c10d_functional.wait_tensor.default"


def _is_launch(node: Any) -> bool:
    return isinstance(node, Node) and str(node.target).startswith("triton_kernel_wrapper_")


def _is_view(node: Node) -> bool:
    if _is_wait(node):
        return True
    if node.target is operator.getitem:
        return not is_kernel(node.args[0])  # of a split, say
    return isinstance(node.target, torch._ops.OpOverload) and bool(node.target.is_view)


def _bytes(node: Node) -> int:
    return sum(byte_hint(v) for v in tree_leaves(node.meta.get("val")) if isinstance(v, torch.Tensor))
