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

from te_dynamo.dialect import is_te
from te_dynamo.dialect.memory import is_product

__all__ = ["peak_bytes", "saved_bytes", "timeline"]

_CALLERS = ("primals", "tangents")
"""Inputs that the caller keeps: parameters, the model's input, the gradient of its output."""


def peak_bytes(graph: Graph) -> int:
    """The most that is alive at once, beside what the caller keeps."""
    return max((alive for _, alive in timeline(graph)), default=0)


def saved_bytes(graph: Graph) -> int:
    """What a backward graph takes of forward, beside what the caller keeps."""
    return sum(map(_bytes, _taken(graph)))


def timeline(graph: Graph) -> Iterator[tuple[Node, int]]:
    """(kernel, bytes alive while it runs), in the order of the graph."""
    steps = _steps(graph)
    last = {owner: index for index, step in enumerate(steps) for owner in (*step.reads, *step.writes)}
    returned = steps[-1].reads
    alive = {node: _bytes(node) for node in _taken(graph)}
    for index, step in enumerate(steps[:-1]):
        dying = {owner for owner in alive if last.get(owner, -1) <= index and owner not in returned}
        reused = _reused(step, dying, alive) if step.is_inductors else 0
        alive |= {owner: _bytes_of_result(owner) for owner in step.writes}
        if not _is_empty(step.node):
            yield step.node, sum(alive.values()) - reused
        for owner in [owner for owner in alive if last.get(owner, -1) <= index and owner not in returned]:
            del alive[owner]


def _reused(step: _Step, dying: set[Node], alive: dict[Node, int]) -> int:
    """Bytes of the step's results that lie in arguments that end with it."""
    free = [alive[owner] for owner in dying & step.reads if owner.op != "placeholder"]
    reused = 0
    for size in map(_bytes_of_result, step.writes):
        if size in free:
            free.remove(size)
            reused += size
    return reused


@dataclasses.dataclass
class _Step:
    """One kernel: whose memory it reads, and what it allocates."""

    node: Node
    reads: set[Node]
    writes: list[Node]
    is_inductors: bool = False

    def takes_in(self, other: _Step, made: set[Node]) -> bool:
        """Whether Inductor has `other`, which is later, in the same kernel: they share what they read, and that is `made` before."""
        shares = not self.reads.isdisjoint(other.reads) or not other.reads.isdisjoint(self.writes)
        return self.is_inductors and shares and other.reads <= made


def _steps(graph: Graph) -> list[_Step]:
    """The last is the output."""
    owners, steps = _owners(graph), list[_Step]()
    inputs = set(graph.find_nodes(op="placeholder"))
    for node in graph.nodes:
        reads = set().union(*(owners[read] for read in node.all_input_nodes))
        if node.op == "output" or _is_kernel(node):
            steps.append(_Step(node, reads, _results(node)))
        elif _is_empty(node):
            steps.append(_Step(node, set(), [node]))
        elif node.op == "call_function" and owners[node] == {node}:
            _add_inductors(steps, _Step(node, reads, [node], is_inductors=True), inputs)
    return steps


def _add_inductors(steps: list[_Step], step: _Step, inputs: set[Node]) -> None:
    """Puts a result of Inductor's into the first of its kernels that may compute it, or into one of its own behind all."""
    made = set(inputs)
    for other in steps:
        made.update(other.writes)
        if other.takes_in(step, made):
            other.reads |= step.reads - set(other.writes)
            other.writes += step.writes
            return
    steps.append(step)


def _owners(graph: Graph) -> dict[Node, set[Node]]:
    """Whose memory a node's value lies in or is computed from: its own where it is written, else what it reads."""
    owners: dict[Node, set[Node]] = {}
    items: dict[tuple[Node, Any], Node] = {}
    for node in graph.nodes:
        source: Any = node.args[0] if node.target is operator.getitem else None
        if source is not None and _is_launch(source):
            owners[node] = owners[source.kwargs["kwargs"][node.args[1]]]
        elif source is not None and _is_kernel(source):
            owners[node] = {items.setdefault((source, node.args[1]), node)}
        elif node.op == "placeholder" or _is_kernel(node) or _is_empty(node) or _leaves_its_kernel(node):
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
    items = {user.args[1]: user for user in node.users if user.target is operator.getitem} if _is_kernel(node) else {}
    return _bytes(node) - sum(map(_bytes, items.values()))


def _taken(graph: Graph) -> list[Node]:
    return [node for node in graph.find_nodes(op="placeholder") if not node.name.startswith(_CALLERS)]


def _leaves_its_kernel(node: Node) -> bool:
    """Whether a kernel reads what Inductor computes there, or the graph returns it."""
    return not _is_view(node) and any(reader.op == "output" or _is_kernel(reader) for reader in _readers(node))


def _readers(node: Node) -> Iterator[Node]:
    for user in node.users:
        yield from _readers(user) if _is_view(user) else (user,)


def _is_empty(node: Node) -> bool:
    return node.target is torch.ops.aten.empty.memory_format


def _is_kernel(node: Any) -> bool:
    by_name = "scaled_dot_product" in str(node.target) or ("c10d_functional" in str(node.target) and not _is_wait(node))
    return _is_launch(node) or is_te(node.target) or is_product(node) or by_name


def _is_wait(node: Any) -> bool:
    """Of a collective, whose result it gives."""
    return str(node.target) == "_c10d_functional.wait_tensor.default"


def _is_launch(node: Any) -> bool:
    return isinstance(node, Node) and str(node.target).startswith("triton_kernel_wrapper_")


def _is_view(node: Node) -> bool:
    if _is_wait(node):
        return True
    if node.target is operator.getitem:
        return not _is_kernel(node.args[0])  # of a split, say
    return isinstance(node.target, torch._ops.OpOverload) and bool(node.target.is_view)


def _bytes(node: Node) -> int:
    return sum(v.numel() * v.element_size() for v in tree_leaves(node.meta["val"]) if isinstance(v, torch.Tensor))
