"""The last stage: every te operation of a graph becomes what runs it.

On a device with kernels, the operation's own launcher is traced in its place: the graph then holds Triton launches that
Inductor writes into its code, without a dispatcher call. A large GEMM stays, for extern_gemm.py to have called. Elsewhere the
operation stays an opaque call whose implementation is the reference. An operation with no kernel at all (te.add_bias,
te.bias_grad) is always traced: its aten operations are Inductor's to fuse.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Iterable

import torch
from torch.fx import Graph, Node

from te_dynamo.errors import LoweringError
from te_dynamo.kernels.availability import kernels_available
from te_dynamo.lowering.extern_gemm import is_extern
from te_dynamo.lowering.fake_values import trust_lowered_values, values_are_right
from te_dynamo.lowering.mutation import analyse_once
from te_dynamo.lowering.trace import Traces, where
from te_dynamo.ops import KERNELS, is_te
from te_dynamo.ops.define import REFERENCE_ONLY

__all__ = ["lower"]


def lower(graph: Graph) -> list[tuple[str, str]]:
    """Rewrites in place; returns (operation, what runs it) of each te node. Raises LoweringError for one it cannot lower."""
    analyse_once()
    trust_lowered_values()
    done = []
    inliner = _Inliner(graph)
    waiting = deque(_te_nodes(graph.nodes))
    while waiting:
        node = waiting.popleft()
        name = str(node.target).removesuffix(".default")
        device = _device(node)
        if node.target not in KERNELS:
            raise LoweringError(f"{name} has no implementation to lower to{where(node)}")
        if node.target in REFERENCE_ONLY:
            waiting.extendleft(reversed(_te_nodes(inliner.inline(node))))  # te.linear is made of te operations
            done.append((name, "Inductor"))
        elif kernels_available(device).ok and is_extern(node):
            done.append((name, "Gluon"))
        elif kernels_available(device).ok:
            waiting.extendleft(reversed(_te_nodes(inliner.inline(node))))  # an opaque operation calls others
            done.append((name, "Triton"))
        else:
            done.append((name, f"reference ({kernels_available(device).reason})"))
    inliner.finish()
    graph.lint()
    return done


def _te_nodes(nodes: Iterable[Node]) -> list[Node]:
    return [node for node in nodes if node.op == "call_function" and is_te(node.target)]


class _Inliner:
    """Puts traces in the place of a graph's nodes.

    What the graph returns is exchanged once, at the end: a forward graph returns all that backward reads, and each exchange
    costs as much as it returns nodes.
    """

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._traces = Traces()
        self._replaced: dict[Node, Node] = {}
        self._dead: list[Node] = []

    def inline(self, node: Node) -> list[Node]:
        """Replaces `node` by the traced nodes of its implementation, and returns them in order."""
        results, traced = self._traces.copy_before(node)
        values_are_right(traced)
        if isinstance(node.meta["val"], torch.Tensor):
            self._replace(node, results[0])
        else:
            for reader in list(node.users):
                if reader.target is not operator.getitem:
                    raise LoweringError(
                        f"{node.target}: its results are read by {reader.target}, not by index{where(node)}"
                    )
                self._replace(reader, results[_index(reader)])
            self._dead.append(node)
        return traced

    def finish(self) -> None:
        """What the graph returns is read from the traces, and what they replaced is gone."""
        output = self._graph.output_node()
        output.args = torch.fx.map_arg(output.args, self._last)
        for node in self._dead:
            self._graph.erase_node(node)

    def _replace(self, node: Node, result: Node) -> None:
        node.replace_all_uses_with(result, delete_user_cb=lambda user: user.op != "output")
        self._replaced[node] = result
        self._dead.append(node)

    def _last(self, node: Node) -> Node:
        while node in self._replaced:
            node = self._replaced[node]
        return node


def _index(reader: Node) -> int:
    index = reader.args[1]
    assert isinstance(index, int)
    return index


def _device(node: Node) -> torch.device:
    for arg in node.all_input_nodes:
        value = arg.meta.get("val")
        if isinstance(value, torch.Tensor):
            return value.device
    raise LoweringError(f"{node.target} reads no tensor{where(node)}")
