"""Registered fusions of operations in an unmodified model: stage 1 ends with this, where any is registered.

    linear = te.linear(x, w, b, config)
    r = torch.nn.functional.relu(linear[0])      ->    y = te.MyFusedOperation(x, [w, b], [], ...)[0]
    y = r ** 2

A chain of norms, linears, activations and sums (passes/torch_ir/operation_chains.py) is a list of operations: the fuser runs the registered
fusions on it, and where one applies, the operation that it made takes the place of the user's nodes: `te::<its class>` for one with a
forward, te.sequence where only backward is fused, where fused operations overlap, or where one holds a part of a link. Nothing else of
the chain changes, and shipped fusions do not run: the graph's own find the same patterns later.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from te_dynamo.errors import UnsupportedError
from te_dynamo.fusion_registry import operation_fusions_digest
from te_dynamo.operations import FusedOperation, OperationFuser
from te_dynamo.operations.fuser import FusedOps, Group
from te_dynamo.operations.run import Call, first_needing_grad
from te_dynamo.operations.sequence import OperationSequence, sequence
from te_dynamo.options import Options
from te_dynamo.passes.torch_ir.match.mutation import refuses
from te_dynamo.passes.torch_ir.match.values import emit, emit_getitem, erase_unused, replace, tensor_of
from te_dynamo.passes.torch_ir.operation_chains import Link, chains
from te_dynamo.report import Report


@dataclasses.dataclass
class _Span:
    """Links that follow one another, to be replaced by one node, and the fused operations that take them."""

    links: list[Link]
    groups: list[Group]

    @property
    def nodes(self) -> list[fx.Node]:
        return [node for link in self.links for node in link.nodes]


def fuse_operations(gm: fx.GraphModule, options: Options, report: Report) -> None:
    """Applies the registered fusions of operations to `gm` and the bodies in it, and reports what they made. Raises FusionError,
    naming the fusion, where one misbehaves."""
    if not operation_fusions_digest():
        return
    for body in [module for module in gm.modules() if isinstance(module, fx.GraphModule)]:
        rewrite = _Rewrite(options, report)
        for chain in list(chains(body.graph, options)):
            rewrite.chain(chain)
        body.graph.lint()
        body.recompile()


class _Rewrite:
    """The rewriting of one graph. Links name the nodes that were there at its beginning; `_new` knows what took their place."""

    def __init__(self, options: Options, report: Report) -> None:
        self.options = options
        self.report = report
        self._replaced: dict[fx.Node, fx.Node] = {}

    def chain(self, chain: Sequence[Link]) -> None:
        """Runs the fuser on a chain and puts in what it made."""
        ops = [op for link in chain for op in link.ops]
        flags = [flag for link in chain for flag in link.flags]
        extra_flags = [flag for link in chain for flag in link.extra_flags]
        call = Call.of(ops, [chain[0].input_flag, *flags, *extra_flags], training=True)
        fused = OperationFuser(ops, recipe=self.options.recipe, shipped=False).fuse(first_needing_grad(call))
        groups = [group for group in (*fused.forward, *fused.backward) if isinstance(group.op, FusedOperation)]
        _check_traceable(groups)
        for span in _spans(chain, groups):
            if self._may_replace(span):
                self._replace(span)
                self.report.fusions += _rows(fused, span.groups)

    def _may_replace(self, span: _Span) -> bool:
        """Whether one node at the place of the last computes the same: nothing of it is gone, or written in between, and whatever
        else reads a tensor inside comes later."""
        if any(node._erased for node in span.nodes) or refuses(span.nodes):
            return False
        return all(self._takes_copy(span, link) for link in span.links[1:] if link.second is not None)

    def _takes_copy(self, span: _Span, link: Link) -> bool:
        """Whether the second reader of a MakeExtraOutput's input can read the extra output in its place."""
        second = link.second
        assert second is not None
        inside = second in span.nodes or second._erased or second < span.links[-1].output
        needs_grad = tensor_of(link.input).requires_grad >= tensor_of(span.links[-1].output).requires_grad  # type: ignore[union-attr]
        return not inside and needs_grad and not refuses([*span.nodes, second])

    def _replace(self, span: _Span) -> None:
        """The span's nodes by one node."""
        links, graph, last = span.links, span.links[-1].output.graph, span.links[-1].output
        copies = [link for link in links if link.second is not None]
        taken = [link for link in copies if self._takes_copy(span, link)]
        input = self._new(links[0].input)
        with graph.inserting_before(last):
            params = [self._param(param, last) for link in links for param in link.params]
            extras = [self._extra(link) for link in links if link.extra is not None]
            results = emit(graph, *self._call(span, input, params, extras), last)
            output = emit_getitem(graph, results, 0)
            for i, link in enumerate(copies):
                if link in taken:
                    assert link.second is not None
                    link.second.replace_input_with(self._new(link.input), emit_getitem(graph, results, 1 + i))
        replace(last, output)
        self._replaced[last] = output
        erase_unused(graph, span.nodes)

    def _call(self, span: _Span, input: fx.Node, params: list[fx.Node], extras: list[fx.Node]) -> tuple[Any, Any]:
        """(operation, arguments): that of the fused class where it stands for the whole span, te.sequence elsewhere."""
        links, fused = span.links, span.groups[0].op
        ops = tuple(op for link in links for op in link.ops)
        flags = [links[0].input_flag]
        flags += [flag for link in links for flag in link.flags]
        flags += [flag for link in links for flag in link.extra_flags]
        if all(group.op is fused for group in span.groups) and fused.basic_ops == ops and fused.has_forward:
            return fused.forward_overload, (input, params, extras, fused, Call.of(ops, flags, training=True))
        described = OperationSequence(ops, self.options.recipe, shipped=False)
        return sequence, (input, params, extras, described, flags, True, operation_fusions_digest())

    def _param(self, param: fx.Node | tuple[fx.Node, ...], like: fx.Node) -> fx.Node:
        if isinstance(param, fx.Node):
            return self._new(param)
        return emit(like.graph, torch.cat, ([self._new(part) for part in param], 0), like)

    def _extra(self, link: Link) -> fx.Node:
        """What the sum adds, by what it reads now."""
        (node,) = link.nodes
        a, b = node.args
        extra = b if a is self._new(link.input) else a
        assert isinstance(extra, fx.Node)
        return extra

    def _new(self, node: fx.Node) -> fx.Node:
        while node in self._replaced:
            node = self._replaced[node]
        return node


def _check_traceable(groups: Sequence[Group]) -> None:
    """Nothing to break the graph at here, where the user's own code is what is fused."""
    for name in (type(group.op).__qualname__ for group in groups if not group.op._use_split_forward):
        raise UnsupportedError(
            f"{name} has the legacy fuser_forward, which cannot be traced; give it fuser_forward_compute, fuser_forward_save_ctx "
            'and fuser_forward_fake. options={"fusions": False} runs the model without it'
        )


def _rows(fused: FusedOps, groups: Sequence[Group]) -> list[tuple[str, str, int]]:
    """(pass, class, 1) for each fused operation, as of a te.sequence of the user's."""
    halves = {
        "forward": {id(group.op) for group in fused.forward},
        "backward": {id(group.op) for group in fused.backward},
    }
    rows = {}
    for op in (group.op for group in groups):
        phases = [phase for phase, ops in halves.items() if id(op) in ops]
        rows[id(op)] = ("joint" if len(phases) == 2 else phases[0], type(op).__name__, 1)
    return list(rows.values())


def _spans(chain: Sequence[Link], groups: Sequence[Group]) -> list[_Span]:
    """The stretches of the chain to be replaced: whole links, no two stretches overlap."""
    places: list[tuple[range, Link]] = []
    for link in chain:
        start = places[-1][0].stop if places else 0
        places.append((range(start, start + len(link.ops)), link))
    spans: list[_Span] = []
    for group in sorted(groups, key=lambda group: group.first):
        touched = [link for where, link in places if set(where) & set(group.indices)]
        if spans and touched[0] in spans[-1].links:
            spans[-1].links.extend(link for link in touched if link not in spans[-1].links)
            spans[-1].groups.append(group)
        else:
            spans.append(_Span(touched, [group]))
    return spans
