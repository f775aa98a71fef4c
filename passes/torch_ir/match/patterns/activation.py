"""gelu, quick_gelu, silu, relu, relu squared and silu(gate) * up -> te.gelu, te.quick_gelu, te.silu, te.relu, te.relu2, te.swiglu.

    s = torch.nn.functional.silu(gate)
    y = s * up                                    ->    y = te.swiglu(gate, up)

Activations written out as formulas: formulas.py.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from te_dynamo.inspect.report import MatchRecord
from te_dynamo.passes.torch_ir.match.mutation import refuses, written_by
from te_dynamo.passes.torch_ir.match.patterns.formulas import MUL, RELU, written_formula
from te_dynamo.passes.torch_ir.match.readers import comes_from_linear, why_its_strides_stay, why_not_read_by_linear
from te_dynamo.passes.torch_ir.match.values import (
    FLOATS,
    arguments,
    calls,
    dtype_name,
    emit,
    erase_unused,
    fixed,
    left_as_plain,
    tensor_of,
)
from te_dynamo.passes.torch_ir.match.where import module_path, source_line

__all__ = ["GELU", "SILU", "match_activation", "match_swiglu", "match_written_activation"]

GELU = {F.gelu, torch._C._nn.gelu}
SILU = {F.silu, torch._C._nn.silu}

_te = torch.ops.te
_WRITTEN: dict[str, tuple[str, Any, tuple[Any, ...]]] = {
    "silu": ("silu", _te.silu.default, ()),
    "quick_gelu": ("quick_gelu", _te.quick_gelu.default, ()),
    "gelu": ("gelu", _te.gelu.default, ("none",)),
    "gelu_tanh": ("gelu", _te.gelu.default, ("tanh",)),
    "relu2": ("relu2", _te.relu2.default, ()),
}
"""{kind of a formula: (kind of its record, operation, options)}"""


def match_swiglu(node: fx.Node) -> MatchRecord | None:
    """Replaces silu(gate) * up where that pays; None when `node` is no such product."""
    for silu, up in _factors(node):
        gate, inner = _silu_of(silu)
        if gate is None or not _same_tensor_kind(silu, up, node):
            continue
        if len(silu.users) != 1:
            return _record("swiglu", node, f"its intermediate value {silu} is used elsewhere too")
        return _replace("swiglu", _te.swiglu.default, (gate, up), (), (*inner, node))
    return None


def match_written_activation(node: fx.Node) -> MatchRecord | None:
    """Replaces an activation written out, where that pays; None when `node` is not the last operation of one."""
    formula = written_formula(node)
    if formula is None:
        return None
    kind, op, options = _WRITTEN[formula.kind]
    return _replace(kind, op, (formula.x,), options, formula.nodes)


def match_activation(node: fx.Node) -> MatchRecord | None:
    """Replaces a call of gelu, silu or relu where that pays; None when `node` is none of them."""
    if calls(node, GELU):
        given = arguments(node, "input", "approximate") or {}
        approximate = given.get("approximate", "none")
        return _replace("gelu", _te.gelu.default, (given.get("input"),), (approximate,), (node,))
    if calls(node, *RELU):
        kind, op = "relu", _te.relu.default
    elif calls(node, SILU):
        kind, op = "silu", _te.silu.default
    else:
        return None
    if written_by(node):
        return _record(kind, node, "it works in place")
    x = (arguments(node, "input", "inplace") or {}).get("input")
    return _replace(kind, op, (x,), (), (node,))


def _replace(
    kind: str, op: Any, reads: tuple[Any, ...], options: tuple[Any, ...], nodes: tuple[Any, ...]
) -> MatchRecord:
    last = nodes[-1]
    reason = left_as_plain(*reads, last) or _dtype_reason(kind, last, reads)
    if not reason and not any(map(comes_from_linear, reads)):
        reason = why_not_read_by_linear(last)
    reason = reason or _stride_reason(kind, reads) or why_its_strides_stay(last) or refuses(nodes)
    record = _record(kind, last, reason)
    if not reason:
        with last.graph.inserting_before(last):
            new = emit(last.graph, op, (*reads, *options), last)
        last.replace_all_uses_with(new)
        erase_unused(last.graph, nodes)
    return record


def _dtype_reason(kind: str, node: fx.Node, reads: tuple[fx.Node, ...]) -> str:
    dtypes = [tensor_of(n).dtype for n in (*reads, node)]
    if dtypes[0] not in FLOATS:
        return f"its input is {dtype_name(dtypes[0])}; te.{kind} takes bf16, fp16 and fp32"
    if len(set(dtypes)) > 1:
        out, x = dtype_name(dtypes[-1]), dtype_name(dtypes[0])
        return f"its operands are not all {x}, or its output is {out}; te.{kind} takes and gives one dtype"
    return ""


def _stride_reason(kind: str, reads: tuple[fx.Node, ...]) -> str:
    """te.swiglu reads parts of a wider tensor where they lie; what does not lie in rows it would have to copy."""
    for name, node in zip(("gate", "up"), reads if kind == "swiglu" else (), strict=False):
        value = tensor_of(node)
        if value.dim() and fixed(value.shape[-1]) != 1 and fixed(value.stride(-1)) != 1:
            strides = list(value.stride())
            return f"its {name}'s strides are {strides}; te.swiglu reads rows whose values lie side by side; left to Inductor"
    return ""


def _silu_of(node: Any) -> tuple[Any, tuple[fx.Node, ...]]:
    """(a, nodes) of silu(a) or a * sigmoid(a); (None, ()) of anything else."""
    if calls(node, SILU):
        return (arguments(node, "input", "inplace") or {}).get("input"), (node,)
    formula = written_formula(node)
    return (formula.x, formula.nodes) if formula is not None and formula.kind == "silu" else (None, ())


def _factors(node: Any) -> list[tuple[fx.Node, fx.Node]]:
    """The two tensors of a product, in both orders."""
    if not calls(node, *MUL) or node.kwargs or len(node.args) != 2:
        return []
    a, b = node.args
    return [(a, b), (b, a)] if isinstance(a, fx.Node) and isinstance(b, fx.Node) else []


def _same_tensor_kind(*nodes: fx.Node) -> bool:
    """Whether they agree in shape and dtype, so that their product neither broadcasts nor promotes."""
    values = [tensor_of(node) for node in nodes]
    return all(v is not None and v.dtype == values[0].dtype and v.shape == values[0].shape for v in values)


def _record(kind: str, node: fx.Node, reason: str) -> MatchRecord:
    value = tensor_of(node)
    dtype = "" if value is None else dtype_name(value.dtype)
    return MatchRecord(kind, module_path(node), source_line(node), matched=not reason, reason=reason, dtype=dtype)
