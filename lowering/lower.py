"""The last stage: every te operation of a graph becomes what runs it.

On a device with kernels, the operation's own launcher is traced in its place: the graph then holds Triton launches that
Inductor writes into its code, without a dispatcher call. A large GEMM stays, for extern/gemm.py to have called. Elsewhere the
operation stays an opaque call whose implementation is the reference. An operation with no kernel at all (te.add_bias,
te.bias_grad) is always traced: its aten operations are Inductor's to fuse.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Iterable

import torch
from torch.fx import Graph, Node

from te_dynamo.dialect.define import KERNELS, REFERENCE_ONLY, is_te
from te_dynamo.errors import LoweringError
from te_dynamo.kernels.gemm.cublaslt import SCALED_MM
from te_dynamo.kernels.runtime import availability
from te_dynamo.lowering.extern.gemm import is_extern
from te_dynamo.lowering.inductor.fake_values import values_are_right
from te_dynamo.lowering.inductor.install import install
from te_dynamo.lowering.one_pass import give_hints
from te_dynamo.lowering.trace import Traces, where
from te_dynamo.torch_private.private import compiling_ours


@compiling_ours()
def lower(graph: Graph) -> list[tuple[str, str]]:
    """Rewrites in place; returns (operation, what runs it) of each te node. Raises LoweringError for one it cannot lower."""
    install()
    done = []
    waiting = deque(_te_nodes(graph.nodes))
    hints = give_hints(graph)
    inliner = _Inliner(graph)
    while waiting:
        node = waiting.popleft()
        name = str(node.target).removesuffix(".default")
        device = _device(node)
        if node.target not in KERNELS:
            raise LoweringError(f"{name} has no implementation to lower to{where(node)}")
        if node.target in REFERENCE_ONLY:
            waiting.extendleft(reversed(_te_nodes(inliner.inline(node))))  # te.linear is made of te operations
            done.append((name, "Inductor"))
        elif availability.kernels_available(device).ok and is_extern(node):
            done.append((name, "Gluon"))
        elif availability.kernels_available(device).ok:
            traced = inliner.inline(node, hints.get(node))
            waiting.extendleft(reversed(_te_nodes(traced)))  # an opaque operation calls others
            by_cublaslt = any(n.target is SCALED_MM for n in traced)
            done.append((name, "cuBLASLt" if by_cublaslt else "Triton"))
        else:
            done.append((name, f"reference ({availability.kernels_available(device).reason})"))
    inliner.finish()
    graph.lint()
    return done


def _te_nodes(nodes: Iterable[Node]) -> list[Node]:
    return [node for node in nodes if node.op == "call_function" and is_te(node.target)]


class _Inliner:
    """Puts traces in the place of a graph's nodes.

    A forward graph returns all that backward reads, and each exchange among the output's arguments costs as much as it returns
    nodes. So until `finish` the output reads stand-ins, each of which reads what is returned: there it is replaced, and in_place.py
    sees among a node's users that it is returned.
    """

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._traces = Traces()
        output = graph.output_node()
        with graph.inserting_before(output):
            self._stand_ins = {node: graph.call_function(_returned, (node,)) for node in output.all_input_nodes}
        output.args = torch.fx.map_arg(output.args, self._stand_ins.__getitem__)

    def inline(self, node: Node, hint: Node | None = None) -> list[Node]:
        """Replaces `node` by the traced nodes of its implementation, which is given the hint of its scales, and returns them in order."""
        results, traced = self._traces.copy_before(node, hint)
        values_are_right(traced)
        if isinstance(node.meta["val"], torch.Tensor):
            node.replace_all_uses_with(results[0])
        else:
            for reader in list(node.users):
                if reader.target is not operator.getitem:
                    raise LoweringError(
                        f"{node.target}: its results are read by {reader.target}, not by index{where(node)}"
                    )
                reader.replace_all_uses_with(results[_index(reader)])
                self._graph.erase_node(reader)
        self._graph.erase_node(node)
        return traced

    def finish(self) -> None:
        """The graph returns what the stand-ins read, and they are gone."""
        output = self._graph.output_node()
        output.args = torch.fx.map_arg(output.args, lambda stand_in: stand_in.args[0])
        for stand_in in self._stand_ins.values():
            self._graph.erase_node(stand_in)


def _returned(value: torch.Tensor) -> torch.Tensor:
    """What a stand-in calls; no graph that runs holds one."""
    return value


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
