"""F.linear -> te.linear, for every linear that the recipe covers and FP8 GEMMs can take.

    y = torch._C._nn.linear(x, weight, bias)    ->    y = te.linear(x, weight, bias, LinearConfig(...))[0]

Under autocast the result has another dtype than the operands; the casts that autocast would make become
nodes. Products written as matmul, addmm or Conv1D are left, and recorded so that none is silent.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
import torch.nn.functional as F
from te_dynamo.passes.match.values import (
    FLOATS,
    arguments,
    calls,
    dtype_name,
    emit,
    emit_getitem,
    emit_method,
    erase_unused,
    left_as_plain,
    tensor_of,
)
from te_dynamo.passes.match.where import module_path, source_line
from torch import fx

from te_dynamo.ops.linear import LinearConfig
from te_dynamo.options import Options
from te_dynamo.recipe import Recipe
from te_dynamo.report import MatchRecord

__all__ = ["match_linear"]

Sizes = tuple[Any, ...]
"""(M, N, K), each an int or a SymInt."""

ALIGNMENT = 16
"""FP8 GEMMs read rows of whole 16-byte units."""

_LINEAR = {F.linear, torch._C._nn.linear, torch.ops.aten.linear.default}
_MATMUL = {torch.matmul, torch.mm, operator.matmul}
_MATMUL_METHODS = {"matmul", "mm", "__matmul__"}
_TRANSPOSED = {torch.t, torch.transpose}
_TRANSPOSED_METHODS = {"t", "transpose"}


def match_linear(node: fx.Node, options: Options, outside: str = "") -> MatchRecord | None:
    """Replaces `node` by te.linear where it is a linear that may become one; its record, or None when it is
    no linear.

    outside: a reason that holds for the whole graph (a body that is not rewritten), "" normally.
    """
    if calls(node, _LINEAR):
        return _match(node, options, outside)
    product = _matmul(node)
    if product is None:
        return None
    record, recipe = _record(node, *product, options)
    record.matched, record.recipe = False, ""
    if recipe is not None:
        record.reason = outside or "written as matmul; write F.linear or nn.Linear to have it in the recipe"
    return record


def _match(node: fx.Node, options: Options, outside: str) -> MatchRecord:
    given = arguments(node, "input", "weight", "bias") or {}
    x, weight, bias = given.get("input"), given.get("weight"), given.get("bias")
    record, recipe = _record(node, weight, _sizes(x, weight), options)
    if recipe is not None:
        record.reason = outside or _reason(node, x, weight, bias)
    if record.reason:
        record.matched, record.recipe = False, ""
        return record
    out = tensor_of(node)
    config = LinearConfig.from_recipe(
        recipe,
        input_requires_grad=out.requires_grad and tensor_of(x).requires_grad,
        weight_requires_grad=out.requires_grad and tensor_of(weight).requires_grad,
    )
    graph = node.graph
    with graph.inserting_before(node):
        operands = [o if o is None else _cast(o, out.dtype, node) for o in (x, weight, bias)]
        saved = emit(graph, torch.ops.te.linear.default, (*operands, config), node)
        new = emit_getitem(graph, saved, 0)
    node.replace_all_uses_with(new)
    erase_unused(graph, [node])
    return record


def _cast(operand: fx.Node, dtype: torch.dtype, like: fx.Node) -> fx.Node:
    if tensor_of(operand).dtype == dtype:
        return operand
    return emit_method(like.graph, "to", (operand, dtype), like)


def _reason(node: fx.Node, x: Any, weight: Any, bias: Any) -> str:
    """Why this linear stays what it is, "" when it becomes te.linear."""
    if not (isinstance(x, fx.Node) and isinstance(weight, fx.Node) and (bias is None or isinstance(bias, fx.Node))):
        return "its operands are not all tensors of the graph"
    return (
        left_as_plain(node, x, weight, bias) or _dtype_reason(node, x, weight, bias) or _shape_reason(x, weight, bias)
    )


def _dtype_reason(node: fx.Node, x: fx.Node, weight: fx.Node, bias: fx.Node | None) -> str:
    out = tensor_of(node).dtype
    for name, operand in (("input", x), ("weight", weight), ("bias", bias), ("output", node)):
        if operand is not None and tensor_of(operand).dtype not in FLOATS:
            return f"its {name} is {dtype_name(tensor_of(operand).dtype)}; te.linear takes bf16, fp16 and fp32"
    if tensor_of(x).dtype == tensor_of(weight).dtype != out:  # autocast casts both; anything else is not autocast
        return "" if out in (torch.bfloat16, torch.float16) else f"its output is {dtype_name(out)}, unlike its operands"
    return ""


def _shape_reason(x: fx.Node, weight: fx.Node, bias: fx.Node | None) -> str:
    shape, rank = tensor_of(weight).shape, tensor_of(x).dim()
    if len(shape) != 2 or rank < 1:
        return f"its weight has {len(shape)} dimensions and its input {rank}; expected 2, and 1 or more"
    n, k = shape
    if not (isinstance(n, int) and isinstance(k, int)):
        return f"its weight has the dynamic shape [{n}, {k}]; te.linear needs N and K fixed"
    if bias is not None and tuple(tensor_of(bias).shape) != (n,):
        return f"its bias has shape {list(tensor_of(bias).shape)}; expected [{n}]"
    if n % ALIGNMENT or k % ALIGNMENT or not n or not k:
        return f"N = {n}, K = {k}: FP8 GEMMs need N and K to be multiples of {ALIGNMENT}"
    if any(isinstance(size, int) and size == 0 for size in tensor_of(x).shape[:-1]):
        return "its input has no rows"
    return ""


def _record(node: fx.Node, weight: Any, sizes: Sizes, options: Options) -> tuple[MatchRecord, Recipe | None]:
    """The record as if matched, and the recipe that applies."""
    record = MatchRecord("linear", module_path(node, _stripped(weight)), source_line(node))
    recipe, record.reason = options.recipe_for(record.module)
    record.recipe = "" if recipe is None else recipe.name
    out = tensor_of(node)
    record.dtype = "" if out is None else dtype_name(out.dtype)
    record.shape = tuple(map(str, sizes))
    record.flops = 2 * math.prod(map(_hint, sizes)) if sizes else 0
    return record, recipe


def _sizes(x: Any, weight: Any) -> Sizes:
    """(M, N, K) of F.linear(x, weight), () where the graph does not say."""
    value, w = tensor_of(x), tensor_of(weight)
    if value is None or w is None or value.dim() < 1 or w.dim() != 2:
        return ()
    return (math.prod(value.shape[:-1]), w.shape[0], value.shape[-1])


def _hint(size: Any) -> int:
    """The size, the one seen while tracing where dynamic, 0 where data decides it."""
    if isinstance(size, int):
        return size
    node = size.node
    return int(node.hint) if node.has_hint() else 0


def _matmul(node: fx.Node) -> tuple[fx.Node, Sizes] | None:
    """(weight, (M, N, K)) of a matrix product with a 2-D parameter, None for any other node (attention's
    too)."""
    if calls(node, {torch.addmm}, {"addmm"}):
        left, right = node.args[1:3] if len(node.args) >= 3 else (node.kwargs.get("mat1"), node.kwargs.get("mat2"))
    elif calls(node, _MATMUL, _MATMUL_METHODS) and len(node.args) == 2:
        left, right = node.args
    else:
        return None
    a, b = tensor_of(left), tensor_of(right)
    if a is None or b is None or a.dim() < 1 or b.dim() < 1:
        return None
    if _is_parameter(right):
        return right, (math.prod(a.shape[:-1]), b.shape[1], b.shape[0])
    if _is_parameter(left):  # weight @ x: the columns of x are the rows of a linear
        return left, (math.prod(b.shape[:-2]) * (b.shape[-1] if b.dim() > 1 else 1), a.shape[0], a.shape[1])
    return None


def _is_parameter(node: Any) -> bool:
    weight, value = _stripped(node), tensor_of(node)
    if weight is None or value is None or value.dim() != 2 or weight.op not in ("placeholder", "get_attr"):
        return False
    held = isinstance(weight.type, type) and issubclass(weight.type, torch.nn.Parameter)
    leaf = tensor_of(weight)
    return held or "_parameters_" in str(weight.target) or (leaf is not None and leaf.is_leaf and leaf.requires_grad)


def _stripped(node: Any) -> fx.Node | None:
    """The tensor below transposes and casts."""
    while isinstance(node, fx.Node) and (
        calls(node, _TRANSPOSED, _TRANSPOSED_METHODS | {"to", "type_as", "float", "bfloat16", "half"})
        or (calls(node, {getattr}) and node.args[1] in ("T", "mT"))
    ):
        node = node.args[0]
    return node if isinstance(node, fx.Node) else None
