"""gelu, quick_gelu, silu, relu, relu squared -> te.gelu, te.quick_gelu, te.silu, te.relu, te.relu2.

Activations written out as formulas: formulas.py. Of an activation that gates another tensor, gated.py makes te.gated first.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from te_dynamo.passes.torch_ir.match.mutation import refuses
from te_dynamo.passes.torch_ir.match.patterns.formulas import MUL, RELU, written_formula
from te_dynamo.passes.torch_ir.match.readers import (
    comes_from_linear,
    linear_behind,
    why_its_strides_stay,
    why_not_read_by_linear,
    with_one_row,
)
from te_dynamo.passes.torch_ir.match.values import (
    FLOATS,
    arguments,
    calls,
    dtype_name,
    emit,
    erase_unused,
    left_as_plain,
    replace,
    sole_user,
    tensor_of,
)
from te_dynamo.passes.torch_ir.match.where import record
from te_dynamo.report import MatchRecord

_GELU = {F.gelu, torch._C._nn.gelu}
_SILU = {F.silu, torch._C._nn.silu}

_OPERATIONS: dict[str, tuple[str, Any, tuple[Any, ...]]] = {
    "gelu": ("gelu", torch.ops.te.gelu.default, ("none",)),
    "gelu_tanh": ("gelu", torch.ops.te.gelu.default, ("tanh",)),
    "quick_gelu": ("quick_gelu", torch.ops.te.quick_gelu.default, ()),
    "silu": ("silu", torch.ops.te.silu.default, ()),
    "relu": ("relu", torch.ops.te.relu.default, ()),
    "relu2": ("relu2", torch.ops.te.relu2.default, ()),
}
"""Kind -> (what records call it, the operation, its arguments behind x)."""


_WITHOUT_KERNEL = {
    "mish": {F.mish, torch._C._nn.mish},
    "hardswish": {F.hardswish, torch._C._nn.hardswish},
}


def match_activation(node: fx.Node) -> MatchRecord | None:
    """Replaces a call of gelu, silu or relu where that pays, and has a record of those beside a linear that no kernel computes; None
    when `node` is none."""
    for kind, spellings in _WITHOUT_KERNEL.items():
        if calls(node, spellings) and (linear_behind(node.args[0]) or not why_not_read_by_linear(node)):
            return record(kind, node, f"te_dynamo has no kernel of {kind}; left to Inductor")
    found = _called(node)
    return None if found is None else _match(node, *found)


def match_written_activation(node: fx.Node) -> MatchRecord | None:
    """Replaces an activation written out, where that pays; None when `node` is not the last operation of one."""
    found = _written(node)
    return None if found is None else _match(node, *found)


def _match(node: fx.Node, kind: str, x: fx.Node, nodes: tuple[fx.Node, ...]) -> MatchRecord:
    name, op, options = _OPERATIONS[kind]
    reader = sole_user(node)
    if reader is not None and factors(reader):
        return record(name, with_one_row(nodes), "only a product reads it, which no kernel takes; left to Inductor")
    return replace_activation(name, op, (x,), options, nodes)


_Activation = tuple[str, fx.Node, tuple[fx.Node, ...]]
"""(kind, x, the nodes that are f(x))"""


def activation_of(node: Any) -> _Activation | None:
    """The activation that `node` is, however it is spelled: (kind, x, the nodes that are f(x))."""
    return _called(node) or _written(node)


def _called(node: Any) -> _Activation | None:
    kind: str | None
    nodes: tuple[fx.Node, ...]
    if calls(node, _GELU):
        given, nodes = arguments(node, "input", "approximate") or {}, (node,)
        x, kind = given.get("input"), {"none": "gelu", "tanh": "gelu_tanh"}.get(given.get("approximate", "none"))
    elif calls(node, *RELU):
        kind, x, nodes = "relu", (arguments(node, "input", "inplace") or {}).get("input"), (node,)
    elif calls(node, _SILU):
        kind, x, nodes = "silu", (arguments(node, "input", "inplace") or {}).get("input"), (node,)
    else:
        return None
    return (kind, x, nodes) if kind is not None and isinstance(x, fx.Node) else None


def _written(node: Any) -> _Activation | None:
    formula = written_formula(node)
    return formula and (formula.kind, formula.x, formula.nodes)


def replace_activation(
    kind: str, op: Any, reads: tuple[fx.Node, ...], options: tuple[Any, ...], nodes: tuple[fx.Node, ...]
) -> MatchRecord:
    """Puts op(*reads, *options) in the place of `nodes` where that pays, next to matched linears. kind: what the record calls it."""
    last = nodes[-1]
    reason = left_as_plain(*reads, last) or _dtype_reason(kind, last, reads)
    if not reason and not all(map(comes_from_linear, reads)):
        reason = why_not_read_by_linear(last)
    reason = reason or why_its_strides_stay(last) or refuses(nodes)
    if not reason:
        with last.graph.inserting_before(last):
            new = emit(last.graph, op, (*reads, *options), last)
        replace(last, new)
        erase_unused(last.graph, nodes)
    return record(kind, with_one_row(nodes) if reason else last, reason)


def _dtype_reason(kind: str, node: fx.Node, reads: tuple[fx.Node, ...]) -> str:
    dtypes = [tensor_of(n).dtype for n in (*reads, node)]
    if dtypes[0] not in FLOATS:
        return f"its input is {dtype_name(dtypes[0])}; te.{kind} takes bf16, fp16 and fp32"
    if len(set(dtypes)) > 1:
        out, x = dtype_name(dtypes[-1]), dtype_name(dtypes[0])
        return f"its operands are not all {x}, or its output is {out}; te.{kind} takes and gives one dtype"
    return ""


def factors(node: Any) -> list[tuple[fx.Node, fx.Node]]:
    """The two tensors of a product, in both orders."""
    if not calls(node, *MUL) or node.kwargs or len(node.args) != 2:
        return []
    a, b = node.args
    return [(a, b), (b, a)] if isinstance(a, fx.Node) and isinstance(b, fx.Node) else []
