"""A loop over experts that each take a piece of one tensor -> one te.grouped_linear.

    pieces = torch.split(x, sizes)                                 fixed sizes; or chunk, tensor_split
    y = torch.cat([F.linear(piece, expert.weight) for piece, expert in zip(pieces, experts)])

Only this form is one product: every piece, in order, is read by its linear, and what these give goes nowhere else. In
any other loop, and in recipes with scales of blocks, each linear becomes a te.linear of its own. The weights are put into one tensor for the call, which costs
a copy of them (once a step where quantized weights are kept); parameters in one tensor and F.grouped_mm do not.
"""

from __future__ import annotations

import itertools
import operator
from typing import Any

import torch
from torch import fx

from te_dynamo.passes.torch_ir.match.mutation import refuses
from te_dynamo.passes.torch_ir.match.patterns.grouped import emit_grouped_linear, recipe_reason, shape_reason
from te_dynamo.passes.torch_ir.match.patterns.linears.linear import RecipeFor, cast, dtype_reason, linear_record
from te_dynamo.passes.torch_ir.match.patterns.linears.padding import columns_of
from te_dynamo.passes.torch_ir.match.patterns.linears.products import LINEAR
from te_dynamo.passes.torch_ir.match.values import (
    arguments,
    calls,
    emit,
    emit_method,
    erase_unused,
    fixed,
    left_as_plain,
    replace,
    sole_user,
    tensor_of,
)
from te_dynamo.recipe import Recipe
from te_dynamo.report import RECORD, MatchRecord

_CAT = {torch.cat, torch.concat, torch.concatenate}
_SPLIT = {torch.split, torch.chunk, torch.tensor_split}
_SPLIT_METHODS = {"split", "chunk", "tensor_split"}


def match_expert_loop(node: fx.Node, recipe_for: RecipeFor, outside: str = "") -> list[MatchRecord]:
    """Replaces a concatenation `node` of linears on the pieces of one split; a record for each of these linears, or none
    for any other node, whose linears are match_linear's.

    recipe_for, outside: as for match_linear.
    """
    linears = _linears(node)
    if not linears or outside:
        return []
    pieces, weights = zip(*linears.values(), strict=True)
    split: Any = pieces[0].args[0]
    x = split.args[0]
    if not isinstance(x, fx.Node) or not _one_product(node, x, list(linears), list(weights)):
        return []
    if refuses([split, *pieces, *linears, node]):
        return []
    rows = [fixed(tensor_of(piece).shape[0]) for piece, _ in linears.values()]
    sizes = [(size, *tensor_of(weights[0]).shape) for size in rows]
    records = [linear_record(n, w, s, recipe_for) for n, w, s in zip(linears, weights, sizes, strict=True)]
    recipe = records[0][1]
    if recipe is None or any(other != recipe for _, other in records) or None in rows or not any(rows):
        return []
    if sum(rows) != fixed(tensor_of(x).shape[0]):
        return []  # pieces that overlap, or leave some out
    shape = (len(weights), *sizes[0][:0:-1])
    if recipe_reason(recipe) or shape_reason(shape, recipe, False) or not _keeps_apart(recipe):
        return []
    node.meta[RECORD] = records[0]
    graph = node.graph
    with graph.inserting_before(node):
        stacked = emit(graph, torch.stack, ([cast(weight, tensor_of(node).dtype, node) for weight in weights],), node)
        experts = emit_method(graph, "transpose", (stacked, 1, 2), node)
        ends = list(itertools.accumulate(rows))
        new = columns_of(emit_grouped_linear(node, x, experts, _offsets(node, ends), recipe), node)
    replace(node, new)
    erase_unused(graph, [node, *linears, *pieces, split, experts])
    for record, _ in records:
        record.groups = len(weights)
    return [record for record, _ in records]


def _keeps_apart(recipe: Recipe) -> bool:
    """Whether what is kept of experts in one tensor has a part for each: not where scales are those of blocks of the whole."""
    return recipe.input_quantizer().one_scale


def _linears(node: fx.Node) -> dict[fx.Node, tuple[fx.Node, fx.Node]]:
    """Linear -> (its piece, its weight), in order, of a concatenation of linears on all pieces of one split; else {}."""
    given = arguments(node, "tensors", "dim") if calls(node, _CAT) else None
    if given is None or given.get("dim", 0) not in (0, -2) or not isinstance(given.get("tensors"), (list, tuple)):
        return {}
    found: dict[fx.Node, tuple[fx.Node, fx.Node]] = {}
    for index, linear in enumerate(given["tensors"]):
        if not calls(linear, LINEAR) or linear in found or sole_user(linear) is not node:
            return {}
        operands = arguments(linear, "input", "weight", "bias") or {}
        piece, weight = operands.get("input"), operands.get("weight")
        if operands.get("bias") is not None or not isinstance(weight, fx.Node):
            return {}
        if not isinstance(piece, fx.Node) or not _is_piece(piece, index):
            return {}
        found[linear] = (piece, weight)
    splits = {piece.args[0] for piece, _ in found.values()}
    if len(found) < 2 or len(splits) != 1:
        return {}
    pieces: Any = next(iter(splits))
    return found if len(pieces.meta["example_value"]) == len(found) else {}


def _is_piece(node: fx.Node, index: int) -> bool:
    """Whether it is that piece of a tensor split along its rows."""
    if not calls(node, {operator.getitem}) or node.args[1] != index:
        return False
    split = node.args[0]
    if not isinstance(split, fx.Node) or not calls(split, _SPLIT, _SPLIT_METHODS) or not split.args:
        return False
    dim = split.args[2] if len(split.args) > 2 else split.kwargs.get("dim", 0)
    return dim in (0, -2) and isinstance(split.meta.get("example_value"), (list, tuple))


def _one_product(node: fx.Node, x: fx.Node, linears: list[fx.Node], weights: list[fx.Node]) -> bool:
    """Whether dtypes, ranks and weights' shapes allow one product in place of `linears`."""
    if left_as_plain(node, x, *linears, *weights):
        return False
    first = tensor_of(weights[0])
    return (
        not dtype_reason(node, x, weights[0])
        and all(tensor_of(linear).dtype == tensor_of(node).dtype for linear in linears)
        and tensor_of(x).dim() == first.dim() == 2
        and len({(value.dtype, *value.shape) for value in map(tensor_of, weights)}) == 1
    )


def _offsets(node: fx.Node, ends: list[int]) -> fx.Node:
    """int32 [G] of fixed numbers, made by kernels that Inductor fuses: a tensor constant would be copied from the CPU."""
    device, graph = tensor_of(node).device, node.graph
    step = ends[0]
    if ends == [step * (i + 1) for i in range(len(ends))]:
        return emit(graph, torch.arange, (step, ends[-1] + 1, step), node, dtype=torch.int32, device=device)
    parts = [emit(graph, torch.full, ((1,), end), node, dtype=torch.int32, device=device) for end in ends]
    return emit(graph, torch.cat, (parts,), node)
