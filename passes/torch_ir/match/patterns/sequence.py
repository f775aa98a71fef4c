"""te operations in the user's model: linears of te_dynamo.nn and of a Sequential are recorded, and options={"fusions": False} holds for
the latter too.

    te.sequence(x, params, extra, sequence, ...)   ->   the same with OperationSequence(..., fusions=False)

They have their own recipes: the option `recipe` does not change them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from te_dynamo.operations.basic import BasicLinear, GroupedLinear
from te_dynamo.operations.fuser import FusedOps, grouped
from te_dynamo.operations.op import FusedOperation
from te_dynamo.operations.program import split_tensors
from te_dynamo.operations.run import Call, fake
from te_dynamo.operations.sequence import OperationSequence
from te_dynamo.passes.torch_ir.match.patterns.grouped import recipe_reason
from te_dynamo.passes.torch_ir.match.values import calls, dtype_name, hint, replace, tensor_of
from te_dynamo.passes.torch_ir.match.where import emulated_on, linear_path, module_path, source_line
from te_dynamo.quantized.tensor_proto import to_tensor_proto
from te_dynamo.recipe import of_weight
from te_dynamo.report import MatchRecord

_SEQUENCE = frozenset({torch.ops.te.sequence, torch.ops.te.sequence.default})
_LINEARS = frozenset(
    {
        torch.ops.te.linear,
        torch.ops.te.linear_with_workspace,
        torch.ops.te.grouped_linear,
        torch.ops.te.grouped_linear_with_workspace,
    }
)


def match_sequence(node: fx.Node, fusions: bool) -> list[MatchRecord]:
    """A record for each linear of the sequence, or for the linear of te_dynamo.nn, that `node` is; none for any other node."""
    if node.op == "call_function" and getattr(node.target, "overloadpacket", node.target) in _LINEARS:  # no aten.linear
        return [_of_module(node)]
    if not calls(node, _SEQUENCE):
        return []
    records = list(_linears(node))
    sequence = _sequence(node)
    if sequence.fusions and not fusions:
        graph = node.graph
        with graph.inserting_before(node):
            alone = OperationSequence(sequence.ops, sequence.recipe, fusions=False)
            new = graph.call_function(node.target, (*node.args[:3], alone, *node.args[4:]), dict(node.kwargs))  # type: ignore[arg-type]
            new.meta = {key: value for key, value in node.meta.items() if key != "eager_input_vals"}
        replace(node, new)
        graph.erase_node(node)
    return records


def _of_module(node: fx.Node) -> MatchRecord:
    x, weight = (tensor_of(operand) for operand in node.args[:2])  # type: ignore[arg-type]
    config: Any = node.args[3]
    assert x is not None and weight is not None
    path, parameter = linear_path(node, node.args[1])
    recipe = of_weight(config.weight_quantizer)
    *groups, n, k = weight.shape
    rows = math.prod(x.shape[:-1])
    return MatchRecord(
        "linear",
        path,
        source_line(node),
        recipe=recipe.describe(),
        emulated_on=emulated_on(recipe, x),
        shape=(str(rows), str(n), str(k)),
        flops=2 * hint(rows) * n * k,
        dtype=dtype_name(x.dtype),
        groups=groups[0] if groups else 0,
        parameter=parameter,
    )


def fused_operations(graph: fx.Graph) -> Iterator[tuple[str, str, int]]:
    """(pass, class, 1) for each fused operation that the graph's sequences run."""
    for node in graph.nodes:
        if calls(node, _SEQUENCE):
            program = _sequence(node).program(node.args[4], _training(node))
            fused = FusedOps(program.forward, program.backward)
            both = {id(group.op) for group in fused.forward} & {id(group.op) for group in fused.backward}
            for phase, groups in (("forward", fused.forward), ("backward", fused.backward)):
                for group in groups:
                    if isinstance(group.op, FusedOperation) and (phase == "forward" or id(group.op) not in both):
                        yield "joint" if id(group.op) in both else phase, type(group.op).__name__, 1


def _sequence(node: fx.Node) -> OperationSequence:
    sequence = node.args[3]
    assert isinstance(sequence, OperationSequence)
    return sequence


def _training(node: fx.Node) -> bool:
    return bool(node.args[5] if len(node.args) > 5 else node.kwargs["training"])


def _linears(node: fx.Node) -> Iterator[MatchRecord]:
    sequence = _sequence(node)
    call = Call.of(sequence.ops, node.args[4], _training(node))  # type: ignore[arg-type]
    proto = to_tensor_proto(tensor_of(node.args[0]))  # type: ignore[arg-type]
    protos = [[to_tensor_proto(tensor_of(t)) for t in tensors] for tensors in node.args[1:3]]  # type: ignore[union-attr,arg-type]
    params, extra_inputs = split_tensors(sequence.ops, *protos)
    for i, group in enumerate(grouped(sequence.ops)):
        op, given = group.op, proto
        proto = fake(group, call, proto, params, extra_inputs)[0]
        if isinstance(op, (BasicLinear, GroupedLinear)):
            rows, reason = math.prod(given.shape[:-1]), _reason(op)
            recipe = None if reason else op.recipe
            yield MatchRecord(
                "linear",
                f"{module_path(node)}.{i}".removeprefix("."),
                source_line(node),
                matched=not reason,
                reason=reason,
                recipe="" if recipe is None else recipe.describe(),
                emulated_on=emulated_on(recipe, tensor_of(node.args[0])),  # type: ignore[arg-type]
                shape=(str(rows), str(op.out_features), str(op.in_features)),
                flops=2 * hint(rows) * op.out_features * op.in_features,
                dtype=dtype_name(given.dtype),
                groups=op.num_groups if isinstance(op, GroupedLinear) else 0,
            )


def _reason(op: BasicLinear | GroupedLinear) -> str:
    """Why the operation runs in high precision, "" where it has a recipe that it follows."""
    if op.recipe is None:
        return "its Sequential has no recipe"
    return recipe_reason(op.recipe) if isinstance(op, GroupedLinear) else ""
