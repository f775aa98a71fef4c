"""gelu, quick_gelu, silu, relu and silu(gate) * up -> te.gelu, te.quick_gelu, te.silu, te.relu, te.swiglu.

    s = torch.nn.functional.silu(gate)
    y = s * up                                    ->    y = te.swiglu(gate, up)

silu may be written `a * sigmoid(a)`; quick_gelu is written `a * sigmoid(1.702 * a)`.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from te_dynamo.inspect.report import MatchRecord
from te_dynamo.passes.torch_ir.match.mutation import refuses, written_by
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

__all__ = ["GELU", "MUL", "RELU", "SILU", "match_activation", "match_swiglu"]

GELU = {F.gelu, torch._C._nn.gelu}
SILU = {F.silu, torch._C._nn.silu}
RELU = {F.relu, torch.relu, F.relu_, torch.relu_}
_SIGMOID = ({torch.sigmoid, F.sigmoid, torch.special.expit}, {"sigmoid"})
MUL = ({operator.mul, torch.mul}, {"mul", "__mul__", "__rmul__", "multiply"})


def match_swiglu(node: fx.Node) -> MatchRecord | None:
    """Replaces silu(gate) * up where that pays; None when `node` is no such product."""
    for silu, up in _factors(node):
        gate, inner = _silu_of(silu)
        if gate is None or not _same_tensor_kind(silu, up, node):
            continue
        if len(silu.users) != 1:
            return _record("swiglu", node, f"its intermediate value {silu} is used elsewhere too")
        return _replace("swiglu", torch.ops.te.swiglu.default, (gate, up), (), (*inner, node))
    return None


def match_activation(node: fx.Node) -> MatchRecord | None:
    """Replaces gelu, quick_gelu, silu or relu where that pays; None when `node` is none of them."""
    if calls(node, GELU):
        given = arguments(node, "input", "approximate") or {}
        approximate = given.get("approximate", "none")
        return _replace("gelu", torch.ops.te.gelu.default, (given.get("input"),), (approximate,), (node,))
    nodes: tuple[fx.Node, ...]
    if calls(node, RELU, {"relu", "relu_"}):
        kind, op = "relu", torch.ops.te.relu.default
        x, nodes = (arguments(node, "input", "inplace") or {}).get("input"), (node,)
    else:
        x, nodes = _silu_of(node)
        kind, op = "silu", torch.ops.te.silu.default
        if x is None:
            x, nodes = _quick_gelu_of(node)
            kind, op = "quick_gelu", torch.ops.te.quick_gelu.default
        if x is None:
            return None
    if written_by(node):
        return _record(kind, node, "it works in place")
    return _replace(kind, op, (x,), (), nodes)


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
    for sigmoid, a in _factors(node):
        if calls(sigmoid, *_SIGMOID) and sigmoid.args == (a,) and len(sigmoid.users) == 1:
            return a, (sigmoid, node)
    return None, ()


def _quick_gelu_of(node: Any) -> tuple[Any, tuple[fx.Node, ...]]:
    """(a, nodes) of a * sigmoid(1.702 * a); (None, ()) of anything else."""
    for sigmoid, a in _factors(node):
        if calls(sigmoid, *_SIGMOID) and len(sigmoid.args) == len(sigmoid.users) == 1 and not sigmoid.kwargs:
            scaled: Any = sigmoid.args[0]
            product = calls(scaled, *MUL) and len(scaled.users) == 1 and not scaled.kwargs
            if product and scaled.args in ((1.702, a), (a, 1.702)):
                return a, (scaled, sigmoid, node)
    return None, ()


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
