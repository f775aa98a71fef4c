"""f(gate) * up for an activation f, or the sigmoid -> te.gated.

    s = torch.nn.functional.silu(gate)
    y = s * up                                    ->    y = te.gated(gate, up, 'silu')

f is spelled in any way that activation.py knows. A sigmoid gates where a linear makes what it reads; elsewhere
(`x * sigmoid(1.7 * x)`) it is Inductor's. A product of two linears that a third reads is a gate without an activation. F.glu(x) gates the first half of x with the sigmoid of the second.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from te_dynamo.dialect.gated import KINDS
from te_dynamo.passes.torch_ir.match.patterns.activation import activation_of, factors, replace_activation
from te_dynamo.passes.torch_ir.match.patterns.formulas import CLAMP, SIGMOID
from te_dynamo.passes.torch_ir.match.readers import linear_behind, why_not_read_by_linear, with_one_row
from te_dynamo.passes.torch_ir.match.values import (
    arguments,
    calls,
    emit_getitem,
    emit_method,
    erase_unused,
    fixed,
    left_as_plain,
    tensor_of,
)
from te_dynamo.passes.torch_ir.match.where import record
from te_dynamo.report import MatchRecord

_GLU = {F.glu, torch._C._nn.glu}


def match_gated(node: fx.Node) -> MatchRecord | None:
    """Replaces f(gate) * up where that pays; None when `node` is no such product."""
    if calls(node, _GLU):
        return _match_glu(node)
    if activation_of(node) is not None:  # x * sigmoid(x) is silu
        return None
    for function, up in factors(node):
        found = activation_of(function) or _sigmoid_of(function)
        if found is None or found[0] not in KINDS or not _same_tensor_kind(function, up, node):
            continue
        kind, gate, nodes = found
        if len(function.users) != 1:
            return record(f"gated {kind}", node, f"its intermediate value {function} is used elsewhere too")
        if calls(gate, *CLAMP):
            reason = "it clamps its gate first, which no kernel of a gate does; left to Inductor"
            return record(f"gated {kind}", with_one_row((*nodes, node)), reason)
        return _replace(kind, gate, up, (*nodes, node))
    for gate, up in factors(node)[:1]:
        if gate is not up and _same_tensor_kind(gate, up, node) and linear_behind(gate) and linear_behind(up):
            return None if why_not_read_by_linear(node) else _replace("identity", gate, up, (node,))
    return None


def _replace(kind: str, gate: fx.Node, up: fx.Node, nodes: tuple[fx.Node, ...]) -> MatchRecord:
    name = f"gated {kind}"
    reason = left_as_plain(gate, up) or _stride_reason(gate=gate, up=up)
    return (
        record(name, with_one_row(nodes), reason)
        if reason
        else replace_activation(name, torch.ops.te.gated.default, (gate, up), (kind,), nodes)
    )


def _match_glu(node: fx.Node) -> MatchRecord | None:
    """F.glu along the last dimension, of what a linear makes."""
    given = arguments(node, "input", "dim") or {}
    x = given.get("input")
    value = tensor_of(x)
    if value is None or linear_behind(x) is None or given.get("dim", -1) not in (-1, value.dim() - 1):
        return None
    with node.graph.inserting_before(node):
        halves = emit_method(node.graph, "chunk", (x, 2, -1), node)
        up, gate = (emit_getitem(node.graph, halves, index) for index in range(2))
    found = _replace("sigmoid", gate, up, (halves, up, gate, node))
    if not found.matched:
        erase_unused(node.graph, (halves, up, gate))
    return found


def _sigmoid_of(node: Any) -> tuple[str, fx.Node, tuple[fx.Node, ...]] | None:
    """("sigmoid", a, nodes) of sigmoid(a), a from a linear."""
    if not calls(node, *SIGMOID) or len(node.args) != 1 or node.kwargs or linear_behind(node.args[0]) is None:
        return None
    return "sigmoid", node.args[0], (node,)


def _stride_reason(**operands: fx.Node) -> str:
    """te.gated reads parts of a wider tensor where they lie; what does not lie in rows it would have to copy."""
    for name, node in operands.items():
        value = tensor_of(node)
        if value is not None and value.dim() and fixed(value.shape[-1]) != 1 and fixed(value.stride(-1)) != 1:
            strides = list(value.stride())
            return f"its {name}'s strides are {strides}; te.gated reads rows whose values lie side by side; left to Inductor"
    return ""


def _same_tensor_kind(*nodes: fx.Node) -> bool:
    """Whether they agree in shape and dtype, so that their product neither broadcasts nor promotes."""
    values = [tensor_of(node) for node in nodes]
    return all(v is not None and v.dtype == values[0].dtype and v.shape == values[0].shape for v in values)
