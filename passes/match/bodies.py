"""The walk over a graph and the bodies inside it.

`torch.utils.checkpoint`, `mark_compile_region`, `torch.cond` and their like are higher-order ops: nodes that
hold their body as a GraphModule. A body that is a plain stretch of the model is matched like the model.
Inside any other (a scan, a custom autograd function) nothing is rewritten, and each linear is recorded with
that reason.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from te_dynamo.passes.match.activation import match_activation, match_swiglu
from te_dynamo.passes.match.linear import match_linear
from te_dynamo.passes.match.norm import match_norm
from te_dynamo.passes.match.rms_norm import match_written_rms_norm
from torch import fx

from te_dynamo.options import Options
from te_dynamo.report import MatchRecord

__all__ = ["Matcher"]

_PLAIN_BODIES = {
    "tag_activation_checkpoint", "wrap", "wrap_activation_checkpoint", "wrap_with_set_grad_enabled",
    "wrap_with_autocast", "invoke_subgraph", "cond",
}  # fmt: skip

_AFTER_LINEARS = (match_norm, match_written_rms_norm, match_swiglu, match_activation)
"""Matchers that look whether an FP8 linear is next to them, in order: swiglu before the silu inside it."""


class Matcher:
    """Rewrites graphs under one set of options, a body that several nodes share only once."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self._bodies: dict[int, list[MatchRecord]] = {}

    def match(self, gm: fx.GraphModule, outside: str = "") -> list[MatchRecord]:
        """Rewrites `gm` and its bodies in place; its records in the order of the graph.

        outside: why nothing in here may be rewritten, "" normally.
        """
        records: list[tuple[int, MatchRecord]] = []
        place = {node: index for index, node in enumerate(gm.graph.nodes)}
        for node, index in place.items():
            if isinstance(node.target, torch._ops.HigherOrderOperator):
                records += [(index, record) for record in self._match_bodies(gm, node, outside)]
            elif (linear := match_linear(node, self.options, outside)) is not None:
                records.append((index, linear))
        for matcher in () if outside else _AFTER_LINEARS:
            for node in list(gm.graph.nodes):
                if node in place and not node._erased and (record := matcher(node)) is not None:
                    records.append((place[node], record))
        gm.graph.lint()
        gm.recompile()
        return [record for _, record in sorted(records, key=lambda pair: pair[0])]

    def _match_bodies(self, gm: fx.GraphModule, node: fx.Node, outside: str) -> Iterator[MatchRecord]:
        name = node.target.name()  # type: ignore[union-attr]
        if not outside and name not in _PLAIN_BODIES:
            outside = f"inside {name}, whose body te_dynamo does not rewrite"
        for operand in node.all_input_nodes:
            body = getattr(gm, str(operand.target), None) if operand.op == "get_attr" else None
            if isinstance(body, fx.GraphModule):
                if id(body) not in self._bodies:
                    self._bodies[id(body)] = self.match(body, outside)
                yield from (dataclasses.replace(record) for record in self._bodies[id(body)])
