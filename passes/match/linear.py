"""F.linear -> te.linear, for every linear that a recipe covers and its GEMMs can take.

    y = torch._C._nn.linear(x, weight, bias)    ->    y = te.linear(x, weight, bias, LinearConfig(...))[0]

Under autocast the result has another dtype than the operands; the casts that autocast would make become
nodes. What else multiplies by a weight is left, and recorded (products.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from te_dynamo.ops.linear import LinearConfig
from te_dynamo.passes.match.autocast import may_be_autocast
from te_dynamo.passes.match.products import Sizes, products_of, without_casts
from te_dynamo.passes.match.shards import is_shared, layout_of, to_shards
from te_dynamo.passes.match.values import (
    FLOATS,
    arguments,
    calls,
    dtype_name,
    emit,
    emit_getitem,
    emit_method,
    erase_unused,
    fixed,
    left_as_plain,
    tensor_of,
)
from te_dynamo.passes.match.where import module_path, source_line
from te_dynamo.recipe import Recipe
from te_dynamo.report import MatchRecord

__all__ = ["LINEAR", "RecipeFor", "hint", "linear_record", "match_linear", "named_by_rule"]

RecipeFor = Callable[[str], tuple[Recipe | None, str]]
"""(recipe, which rule chose it or why it is None) by module path."""

LINEAR = {F.linear, torch._C._nn.linear, torch.ops.aten.linear.default}


def match_linear(node: fx.Node, recipe_for: RecipeFor, outside: str = "") -> list[MatchRecord]:
    """Replaces `node` by te.linear where it is a linear that may become one; its record, and one for each linear
    that another call hides. None for any other node.

    recipe_for: (recipe, which rule chose it or why it is None) by module path.
    outside: a reason that holds for the whole graph (a body that is not rewritten), "" normally.
    """
    if calls(node, LINEAR):
        return [_match(node, recipe_for, outside)]
    records = []
    for product in products_of(node):
        record, recipe = linear_record(node, product.weight, product.sizes, recipe_for)
        if recipe is not None:
            record.reason = outside or product.reason
        record.matched, record.recipe = False, ""
        records.append(record)
    return records


def _match(node: fx.Node, recipe_for: RecipeFor, outside: str) -> MatchRecord:
    given = arguments(node, "input", "weight", "bias") or {}
    x, weight, bias = given.get("input"), given.get("weight"), given.get("bias")
    record, recipe = linear_record(node, weight, _sizes(x, weight), recipe_for)
    if recipe is not None:
        record.reason = outside or _rewrite(node, x, weight, bias, recipe)
    if recipe is None or record.reason:
        record.matched, record.recipe = False, ""
    return record


def _rewrite(node: fx.Node, x: Any, weight: Any, bias: Any, recipe: Recipe) -> str:
    """Puts te.linear in the place of `node`; the reason where it has to stay, "" where it is gone."""
    if not (isinstance(x, fx.Node) and isinstance(weight, fx.Node) and (bias is None or isinstance(bias, fx.Node))):
        return "its operands are not all tensors of the graph"
    if any(map(is_shared, (x, weight, bias))):
        return _rewrite_shards(node, x, weight, bias, recipe)
    if reason := _reason(node, x, weight, bias, recipe):
        return reason
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
    return ""


def _rewrite_shards(node: fx.Node, x: fx.Node, weight: fx.Node, bias: fx.Node | None, recipe: Recipe) -> str:
    layout = layout_of(x, weight, bias)
    if isinstance(layout, str):
        return layout
    with node.graph.inserting_before(node):
        linear, whole = to_shards(layout, x, weight, bias, node)
    shards: tuple[Any, Any, Any] = linear.args  # type: ignore[assignment]
    reason = _rewrite(linear, *shards, recipe)
    if reason:
        erase_unused(node.graph, [whole, linear, *filter(None, shards)])
        return f"of its shards: {reason}"
    node.replace_all_uses_with(whole)
    erase_unused(node.graph, [node])
    return ""


def _cast(operand: fx.Node, dtype: torch.dtype, like: fx.Node) -> fx.Node:
    if tensor_of(operand).dtype == dtype:
        return operand
    return emit_method(like.graph, "to", (operand, dtype), like)


def _reason(node: fx.Node, x: fx.Node, weight: fx.Node, bias: fx.Node | None, recipe: Recipe) -> str:
    """Why this linear stays what it is, "" when it becomes te.linear."""
    return (
        left_as_plain(node, x, weight, bias)
        or _dtype_reason(node, x, weight, bias)
        or _shape_reason(x, weight, bias, recipe)
    )


def _dtype_reason(node: fx.Node, x: fx.Node, weight: fx.Node, bias: fx.Node | None) -> str:
    out = tensor_of(node).dtype
    for name, operand in (("input", x), ("weight", weight), ("bias", bias), ("output", node)):
        if operand is not None and tensor_of(operand).dtype not in FLOATS:
            return f"its {name} is {dtype_name(tensor_of(operand).dtype)}; te.linear takes bf16, fp16 and fp32"
    dtypes = {tensor_of(operand).dtype for operand in (x, weight, bias) if operand is not None}
    if len(dtypes) > 1 and not may_be_autocast(node, tensor_of(x).device):
        return f"its operands are {' and '.join(sorted(map(dtype_name, dtypes)))} without autocast"
    if tensor_of(x).dtype == tensor_of(weight).dtype != out:  # autocast casts both; anything else is not autocast
        return "" if out in (torch.bfloat16, torch.float16) else f"its output is {dtype_name(out)}, unlike its operands"
    return ""


def _shape_reason(x: fx.Node, weight: fx.Node, bias: fx.Node | None, recipe: Recipe) -> str:
    shape, rank = tensor_of(weight).shape, tensor_of(x).dim()
    if len(shape) != 2 or rank < 1:
        return f"its weight has {len(shape)} dimensions and its input {rank}; expected 2, and 1 or more"
    n, k = map(fixed, shape)
    if n is None or k is None:
        return f"its weight has the dynamic shape {list(shape)}; te.linear needs N and K fixed"
    if bias is not None and tuple(tensor_of(bias).shape) != (n,):
        return f"its bias has shape {list(tensor_of(bias).shape)}; expected [{n}]"
    if n % recipe.alignment or k % recipe.alignment or not n or not k:
        return f"N = {n}, K = {k}: {recipe.gemms} need N and K to be multiples of {recipe.alignment}"
    if any(fixed(size) == 0 for size in tensor_of(x).shape[:-1]):
        return "its input has no rows"
    return ""


def linear_record(node: fx.Node, weight: Any, sizes: Sizes, recipe_for: RecipeFor) -> tuple[MatchRecord, Recipe | None]:
    """The record as if matched, and the recipe that applies."""
    record = MatchRecord("linear", module_path(node, without_casts(weight)), source_line(node))
    recipe, why = recipe_for(record.module)
    record.reason = why if recipe is None else ""
    record.recipe = "" if recipe is None else recipe.describe()
    value = next((v for v in (tensor_of(node), tensor_of(weight)) if v is not None), None)
    record.dtype = "" if value is None else dtype_name(value.dtype)
    record.shape = tuple(map(str, sizes))
    record.flops = 2 * math.prod(map(hint, sizes)) if sizes else 0
    return record, recipe


def named_by_rule(recipe_for: RecipeFor, module: str) -> bool:
    """Whether the recipe of a linear is a rule's choice, not that of the whole model."""
    recipe, why = recipe_for(module)
    return recipe is not None and why != ""


def _sizes(x: Any, weight: Any) -> Sizes:
    """(M, N, K) of F.linear(x, weight), () where the graph does not say."""
    value, w = tensor_of(x), tensor_of(weight)
    if value is None or w is None or value.dim() < 1 or w.dim() != 2:
        return ()
    return (math.prod(value.shape[:-1]), w.shape[0], value.shape[-1])


def hint(size: Any) -> int:
    """The size, the one seen while tracing where dynamic, 0 where data decides it."""
    if isinstance(size, int):
        return size
    node = size.node
    return int(node.hint) if node.has_hint() else 0
