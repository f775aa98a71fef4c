"""Registered fusions of operations in an unmodified model: stage 1 ends with this, where any is registered.

    linear = te.linear(x, w, b, config)
    r = torch.nn.functional.relu(linear[0])      ->    y = te.MyFusedOperation([x], [w, b], ...)[0]
    y = r ** 2

A chain of te.linear and activations, each read by the next alone, is a list of operations (BasicLinear, Bias, SReLU): the fuser runs
the registered fusions on it, and where one applies, the operation that it made takes the place of the user's nodes: `te::<its class>`
for one with a forward, te.sequence where only backward is fused or fused operations overlap. Nothing else of the chain changes, and
shipped fusions do not run: the graph's own find the same patterns later.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from te_dynamo.fusion_registry import operation_fusions_digest
from te_dynamo.operations import GELU, BasicLinear, Bias, FusedOperation, OperationFuser, ReLU, SiLU, SReLU
from te_dynamo.operations.fuser import FusedOps, Group
from te_dynamo.operations.op import BasicOperation
from te_dynamo.operations.run import Call, first_needing_grad
from te_dynamo.operations.sequence import OperationSequence, sequence
from te_dynamo.options import Options
from te_dynamo.passes.match import activation as spellings
from te_dynamo.passes.match.mutation import refuses, written_by
from te_dynamo.passes.match.values import (
    FLOATS,
    arguments,
    calls,
    emit,
    emit_getitem,
    erase_unused,
    left_as_plain,
    sole_user,
    tensor_of,
)
from te_dynamo.passes.match.where import module_path
from te_dynamo.report import Report

__all__ = ["fuse_operations"]

_LINEAR = torch.ops.te.linear.default
_POWERS = ({operator.pow, torch.pow}, {"pow", "__pow__"})
_SQUARES = ({torch.square}, {"square"})


@dataclasses.dataclass
class _Link:
    """One step of a chain: the operations that stand for `nodes`, from `input` to `output`; a flag a parameter, whether it needs
    a gradient."""

    ops: list[BasicOperation]
    input: fx.Node
    output: fx.Node
    nodes: list[fx.Node]
    params: list[fx.Node] = dataclasses.field(default_factory=list)
    flags: list[bool] = dataclasses.field(default_factory=list)


def fuse_operations(gm: fx.GraphModule, options: Options, report: Report) -> None:
    """Applies the registered fusions of operations to `gm` and the bodies in it, and reports what they made. Raises TeError, naming the fusion, where one misbehaves."""
    if not operation_fusions_digest():
        return
    for body in [module for module in gm.modules() if isinstance(module, fx.GraphModule)]:
        taken: set[fx.Node] = set()
        for node in list(body.graph.nodes):
            if node.target is _LINEAR and node not in taken:
                chain = _chain(node, options)
                taken.update(n for link in chain for n in link.nodes)
                _fuse_chain(chain, options, report)
        body.graph.lint()
        body.recompile()


def _chain(node: fx.Node, options: Options) -> list[_Link]:
    """The longest chain that starts at a te.linear."""
    links: list[_Link] = []
    link = _linear(node, options)
    while link is not None:
        links.append(link)
        reader = sole_user(link.output)
        if reader is None:
            break
        link = _linear(reader, options, link.output) if reader.target is _LINEAR else _activation(reader, link.output)
    return links


def _linear(node: fx.Node, options: Options, x: fx.Node | None = None) -> _Link | None:
    """A te.linear (of x); None where its recipe is not the one that the options give it."""
    args: tuple[Any, ...] = node.args
    read, weight, bias, config = args
    output = sole_user(node)
    if output is None or (x is not None and read is not x):
        return None
    recipe, _ = options.recipe_for(module_path(node, weight))
    if recipe is None:
        return None
    out_features, in_features = tensor_of(weight).shape  # type: ignore[union-attr]
    linear = BasicLinear(in_features, out_features, recipe)
    link = _Link([linear], read, output, [node, output], [weight], [config.weight_requires_grad])
    if bias is not None:
        link.ops.append(Bias(out_features))
        link.params.append(bias)
        link.flags.append(tensor_of(output).requires_grad and tensor_of(bias).requires_grad)  # type: ignore[union-attr]
    call = Call.of(link.ops, [config.input_requires_grad, *link.flags], training=True)
    return link if linear.config(call.requires_grad[0]) == config else None


def _activation(node: fx.Node, x: fx.Node) -> _Link | None:
    """gelu, silu, relu or the square of relu, of x."""
    op: BasicOperation | None = None
    if calls(node, {torch.ops.te.gelu.default}):
        op = GELU(str(node.args[1]))
    elif calls(node, spellings.GELU):
        op = GELU((arguments(node, "input", "approximate") or {}).get("approximate", "none"))
    elif calls(node, {torch.ops.te.silu.default} | spellings.SILU):
        op = SiLU()
    elif calls(node, {torch.ops.te.relu.default} | spellings.RELU, {"relu", "relu_"}):
        op = ReLU()
    if op is None or node.all_input_nodes != [x] or written_by(node):
        return None
    nodes = [node]
    square = sole_user(node)
    if isinstance(op, ReLU) and square is not None and _squares(square, node):
        op, nodes = SReLU(), [node, square]
    values = [tensor_of(n) for n in (x, *nodes)]
    if left_as_plain(x, *nodes) or any(v.dtype not in FLOATS or v.dtype != values[0].dtype for v in values):  # type: ignore[union-attr]
        return None
    return _Link([op], x, nodes[-1], nodes)


def _squares(node: fx.Node, x: fx.Node) -> bool:
    """Whether `node` is x ** 2, torch.square(x) or x * x."""
    if calls(node, *_POWERS):
        return not node.kwargs and len(node.args) == 2 and node.args[0] is x and node.args[1] in (2, 2.0)
    if calls(node, *_SQUARES):
        return node.all_input_nodes == [x] and len(node.args) == 1
    return calls(node, *spellings.MUL) and node.args == (x, x) and not node.kwargs


def _fuse_chain(chain: Sequence[_Link], options: Options, report: Report) -> None:
    if not chain:
        return
    ops = [op for link in chain for op in link.ops]
    flags = [chain[0].nodes[0].args[3].input_requires_grad, *(flag for link in chain for flag in link.flags)]  # type: ignore[union-attr]
    call = Call.of(ops, flags, training=True)
    fuser = OperationFuser(ops, recipe=options.recipe, shipped=False)
    fused = fuser.fuse(first_needing_grad(call))
    groups = [group for group in (*fused.forward, *fused.backward) if isinstance(group.op, FusedOperation)]
    for links, inside in _spans(chain, groups):
        nodes = [node for link in links for node in link.nodes]
        if not refuses(nodes):
            first = sum(len(link.ops) for link in chain[: chain.index(links[0])])
            _replace(links, inside, call.requires_grad[first].input, options)
            report.fusions += _rows(fused, inside)


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


def _spans(chain: Sequence[_Link], groups: Sequence[Group]) -> list[tuple[list[_Link], list[Group]]]:
    """The stretches of the chain to be replaced, each with its fused groups: whole links, no two stretches overlap."""
    links: list[tuple[range, _Link]] = []
    for link in chain:
        start = links[-1][0].stop if links else 0
        links.append((range(start, start + len(link.ops)), link))
    spans: list[tuple[list[_Link], list[Group]]] = []
    for group in sorted(groups, key=lambda group: group.first):
        touched = [link for places, link in links if set(places) & set(group.indices)]
        if spans and any(link is spans[-1][0][-1] for link in touched):
            spans[-1][0].extend(link for link in touched if all(link is not other for other in spans[-1][0]))
            spans[-1][1].append(group)
        else:
            spans.append((touched, [group]))
    return spans


def _replace(links: Sequence[_Link], groups: Sequence[Group], input_flag: bool, options: Options) -> None:
    """The links' nodes by one node."""
    ops = tuple(op for link in links for op in link.ops)
    params = [param for link in links for param in link.params]
    flags = [input_flag, *(flag for link in links for flag in link.flags)]
    fused, last = groups[0].op, links[-1].output
    whole = all(group.op is fused for group in groups) and len(fused.basic_ops) == len(ops) and fused.has_forward
    with last.graph.inserting_before(last):
        if whole:
            args: tuple[Any, ...] = (links[0].input, params, [], fused, Call.of(ops, flags, training=True))
            results = emit(last.graph, fused.forward_overload, args, last)
        else:
            described = OperationSequence(ops, options.recipe)
            args = (links[0].input, params, [], described, flags, True, operation_fusions_digest())
            results = emit(last.graph, sequence, args, last)
        output = emit_getitem(last.graph, results, 0)
    last.replace_all_uses_with(output)
    erase_unused(last.graph, [node for link in links for node in link.nodes])
