"""A mixture's experts in one call -> te.grouped_linear.

    F.grouped_mm(x, experts, offs=ends)     x [M, K] sorted by expert, experts [G, K, N] or a transposed [G, N, K]:
                                            torchtitan's experts, and those of transformers
    torch.bmm(x, experts)                   x [G, m, K], experts a parameter [G, K, N]: as many tokens for each expert,
    F.grouped_mm(x, experts)                Llama 4's
    torch.einsum("egcd,edf->egcf", x, w)    the same between changes of shape (contractions.py): GShard's; x @ w[:, None], torch.baddbmm

A weight that the user transposes for the call is read as it is stored, so that nothing is copied; one that is quantized already by its codes and
scales. Experts whose quantization would take longer than their GEMMs save stay what they are (cost.py), unless a rule names them.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from te_dynamo._compat import attribute_read
from te_dynamo.dialect.grouped_linear import GroupedLinearConfig
from te_dynamo.passes.torch_ir.match.autocast import autocast_around
from te_dynamo.passes.torch_ir.match.cost import LEFT_FOR_COST, experts_cost_reason, is_kept
from te_dynamo.passes.torch_ir.match.mutation import reads_through
from te_dynamo.passes.torch_ir.match.origins import Origin, origin_of
from te_dynamo.passes.torch_ir.match.patterns.linears.contractions import emit_contraction
from te_dynamo.passes.torch_ir.match.patterns.linears.fp32 import kept_in_fp32
from te_dynamo.passes.torch_ir.match.patterns.linears.linear import (
    RecipeFor,
    cast,
    dtype_reason,
    linear_record,
    named_by_rule,
)
from te_dynamo.passes.torch_ir.match.patterns.linears.padding import (
    alignment_reason,
    columns_of,
    padded,
    padded_rows,
    padding,
)
from te_dynamo.passes.torch_ir.match.patterns.linears.products import (
    Sizes,
    contraction_by_weight,
    is_parameter,
    takes_groups,
    why_no_linear,
)
from te_dynamo.passes.torch_ir.match.patterns.linears.stored import reads
from te_dynamo.passes.torch_ir.match.values import (
    FLOATS,
    arguments,
    calls,
    dtype_name,
    emit,
    emit_getitem,
    emit_method,
    erase_unused,
    fixed,
    hint,
    left_as_plain,
    name_of,
    put_back,
    quantized_of,
    replace,
    tensor_of,
)
from te_dynamo.rates import rates_of
from te_dynamo.recipe import Recipe
from te_dynamo.report import RECORD, MatchRecord

_GROUPED = {F.grouped_mm, torch._grouped_mm, torch.ops.aten._grouped_mm.default}
_FALLBACK = "transformers::grouped_mm_fallback"
"""What transformers calls in a compiled model whose experts are not bf16, which torch's own does not take."""
_BATCHED = {
    torch.bmm,
    torch.matmul,
    torch.linalg.matmul,
    operator.matmul,
    torch.ops.aten.bmm,
    torch.ops.aten.bmm.default,
}
_BATCHED_METHODS = {"bmm", "matmul", "__matmul__"}


def match_grouped(node: fx.Node, recipe_for: RecipeFor, outside: str = "") -> list[MatchRecord]:
    """Replaces `node` by te.grouped_linear where it is a product with the weights of experts that may become one; its
    record, or none for any other node.

    recipe_for, outside: as for match_linear.
    """
    given = _operands(node)
    if given is None:
        return _match_contraction(node, recipe_for, outside)
    x, weight, offs = given["mat_a"], given["mat_b"], given.get("offs")
    held = _held(node, weight)
    record, recipe = linear_record(node, weight if held is None else held, _sizes(x, weight), recipe_for)
    if recipe is not None:
        record.reason = outside or _reason(node, x, weight, offs, given, recipe)
        if not record.reason and held is not None:
            record.reason = _format_reason(node, weight, quantized_of(held), offs, recipe)
        elif not record.reason and not named_by_rule(recipe_for, record.module, record.parameter):
            record.reason = kept_in_fp32(node, x, weight)
        if held is None and not record.reason and not named_by_rule(recipe_for, record.module, record.parameter):
            record.reason = node.meta[LEFT_FOR_COST] = _cost_reason(node, x, weight, recipe)
    if recipe is None or record.reason:
        record.matched, record.recipe = False, ""
        return [record]
    record.groups = fixed(tensor_of(weight).shape[0]) or 0
    with node.graph.inserting_before(node):
        new = _batched(node, x, weight, recipe) if offs is None else emit_grouped_linear(node, x, weight, offs, recipe)
        new = columns_of(new, node)
    replace(node, new)
    erase_unused(node.graph, [node, *([weight] if _is_transposition(node, weight) else [])])
    return [record]


def _match_contraction(node: fx.Node, recipe_for: RecipeFor, outside: str) -> list[MatchRecord]:
    """The same for a product by letters that share some with the weight: of the torch.bmm that it is between changes of shape."""
    found, index = contraction_by_weight(node) or (None, 0)
    if found is None or not found.groups(index):
        return []
    x, weight = found.operands[1 - index], found.operands[index]
    record, recipe = linear_record(node, weight, found.sizes(index), recipe_for)
    if recipe is not None:
        record.reason = outside or left_as_plain(node, x, weight) or found.reason(index) or why_no_linear(x, weight)
    if recipe is None or record.reason:
        record.matched, record.recipe = False, ""
        return [record]
    before = node.prev
    with node.graph.inserting_before(node), autocast_around(node):
        product, whole = emit_contraction(node, found, index)
    replace(node, whole)  # now, for its readers decide which strides it may have
    (record,) = match_grouped(product, recipe_for, outside)
    if record.matched:
        erase_unused(node.graph, [node])
    else:
        node.meta[RECORD], node.meta[LEFT_FOR_COST] = record, product.meta.get(LEFT_FOR_COST, "")
        put_back(node, whole, before)
    return [record]


def emit_grouped_linear(node: fx.Node, x: fx.Node, weight: fx.Node, offs: fx.Node, recipe: Recipe) -> fx.Node:
    """x [M, K] times the weights [G, K, N] by te.grouped_linear at the graph's insert point, in the dtype of the user's `node`; of an N
    that is padded with the columns behind it (`columns_of`)."""
    transposed = _stored_transposed(node, weight)
    missing, inner = _paddings(tensor_of(weight).shape, recipe, transposed)
    dtype, grad = tensor_of(node).dtype, tensor_of(node).requires_grad
    held = quantized_of(_held(node, weight))
    if held is not None:
        return _multiply_stored(node, cast(x, dtype, node), _held(node, weight), held, offs, recipe)
    x, weight = cast(x, dtype, node), cast(_as_stored(node, weight), dtype, node)
    if inner:
        x, weight = padded_rows(x, inner, node), padded(weight, inner, 1 if transposed else 2, node)
    if missing:
        weight = padded(weight, missing, 2 if transposed else 1, node)
    config = GroupedLinearConfig.from_recipe(
        recipe,
        weight_transposed=transposed,
        input_requires_grad=grad and tensor_of(x).requires_grad,
        weight_requires_grad=grad and tensor_of(weight).requires_grad,
    )
    results = emit(node.graph, torch.ops.te.grouped_linear.default, (x, weight, offs, config), node)
    return emit_getitem(node.graph, results, 0)


def _held(node: fx.Node, weight: Any) -> fx.Node | None:
    """The weight as it is stored where that is quantized already; None of any other."""
    stored: Any = weight.args[0] if isinstance(weight, fx.Node) and _is_transposition(node, weight) else weight
    return stored if quantized_of(stored) is not None else None


def _format_reason(node: fx.Node, weight: Any, held: Any, offs: Any, recipe: Recipe) -> str:
    """Why no grouped GEMM of the recipe multiplies by a weight that is quantized already."""
    there, transposed = held.quantizer, not _is_transposition(node, weight)
    read = recipe.weight_quantizer().for_groups(rowwise=not transposed, columnwise=transposed)
    if offs is None:
        return "its weight is quantized already, and it is no product of tokens that are sorted by expert"
    if tensor_of(weight).requires_grad:
        return "its weight is quantized already, and learns"
    if tensor_of(node).requires_grad and recipe.backward != "quantized" and tensor_of(node).dtype != torch.bfloat16:
        return f"backward multiplies by the values of its quantized weight, in {dtype_name(tensor_of(node).dtype)}; torch's grouped_mm takes bf16"
    if not reads(read, there) or not (there.columnwise if transposed else there.rowwise):
        return f"its weight is {there.in_words()}; {recipe.describe()} multiplies by {read.in_words()}"
    if any(_paddings(tensor_of(weight).shape, recipe, transposed)):
        return f"its weight {list(held.shape)} is quantized already, and has to be padded"
    return ""


def _multiply_stored(node: fx.Node, x: fx.Node, weight: Any, held: Any, offs: fx.Node, recipe: Recipe) -> fx.Node:
    """The product by the codes and scales of `weight`; dgrad too, or by its values where they are none in the other direction."""
    config = GroupedLinearConfig.from_recipe(
        recipe,
        weight_transposed=not held.quantizer.rowwise,
        input_requires_grad=tensor_of(node).requires_grad and tensor_of(x).requires_grad,
        weight_requires_grad=False,
    )
    values = cast(weight, tensor_of(x).dtype, node) if config.grad_output_quantizer is None else None
    config = dataclasses.replace(config, weight_quantizer=held.quantizer, wgrad_in_high_precision=False)
    buffers = [emit(node.graph, getattr, (weight, f"_{name}"), node) for name in held.named_buffers()]
    results = emit(
        node.graph, torch.ops.te.grouped_linear_with_workspace.default, (x, values, offs, config, buffers), node
    )
    return emit_getitem(node.graph, results, 0)


def _stored_transposed(node: fx.Node, weight: fx.Node) -> bool:
    """Whether the weight [G, K, N] lies in memory as such: not where the user transposed one, or made it by strides."""
    value = tensor_of(weight)
    return not _is_transposition(node, weight) and (value.stride(1) != 1 or value.stride(2) == 1)


def _as_stored(node: fx.Node, weight: fx.Node) -> fx.Node:
    """The weight as it lies in memory: [G, K, N] if `_stored_transposed`, else [G, N, K]."""
    if _is_transposition(node, weight):
        return weight.args[0]  # type: ignore[return-value]
    if _stored_transposed(node, weight):
        return weight
    return emit_method(node.graph, "transpose", (weight, 1, 2), node)


def _is_transposition(node: fx.Node, weight: fx.Node) -> bool:
    """Whether the product `node` may read what was transposed in its place."""
    if attribute := attribute_read(weight):
        return attribute == "mT" and reads_through(node, weight)
    dims = weight.args[1:] if calls(weight, {torch.transpose}, {"transpose"}) else ()
    swaps = len(dims) == 2 and all(isinstance(d, int) for d in dims) and {d % 3 for d in dims} == {1, 2}  # type: ignore[operator]
    return swaps and reads_through(node, weight)


def _batched(node: fx.Node, x: fx.Node, weight: fx.Node, recipe: Recipe) -> fx.Node:
    """x [G, m, K] times [G, K, N]: G groups of m rows."""
    graph, value = node.graph, tensor_of(x)
    groups, k, _ = map(fixed, tensor_of(weight).shape)
    assert groups is not None
    rows = fixed(value.shape[1])
    m = rows if rows is not None else emit_method(graph, "size", (x, 1), node)
    flat = emit_method(graph, "reshape", (x, -1, k), node)
    count = emit(graph, torch.arange, (1, groups + 1), node, dtype=torch.int32, device=value.device)
    out = emit_grouped_linear(node, flat, weight, emit(graph, operator.mul, (count, m), node), recipe)
    return emit_method(graph, "reshape", (out, groups, m, tensor_of(out).shape[-1]), node)


def _operands(node: fx.Node) -> dict[str, Any] | None:
    """The arguments of a product with experts by the names of F.grouped_mm; None for any other node."""
    if calls(node, _GROUPED):
        first = ("mat_a", "mat_b") if node.target is F.grouped_mm else ("self", "mat2")
        given = arguments(node, *first, "offs", "bias", "out_dtype")
        return given and {"mat_a": given.pop(first[0]), "mat_b": given.pop(first[1]), **given}
    if node.op == "call_function" and _qualified_name(node.target) == _FALLBACK:
        given = arguments(node, "input", "weight", "offs")
        return given and {"mat_a": given["input"], "mat_b": given["weight"], "offs": given["offs"]}
    batched = calls(node, _BATCHED, _BATCHED_METHODS) and len(node.args) == 2
    if batched and not node.kwargs and takes_groups(*node.args) and is_parameter(node.args[1]):
        return {"mat_a": node.args[0], "mat_b": node.args[1]}
    return None


def _qualified_name(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name
    return getattr(target, "_qualified_op_name", "")


def _sizes(x: Any, weight: Any) -> Sizes:
    """(M, N, K), M the tokens of all experts; () for other forms than the two above."""
    a, b = tensor_of(x), tensor_of(weight)
    if a is None or b is None or b.dim() != 3 or a.dim() not in (2, 3):
        return ()
    return (a.shape[0] if a.dim() == 2 else a.shape[0] * a.shape[1], b.shape[2], b.shape[1])


def _reason(node: fx.Node, x: Any, weight: Any, offs: Any, given: dict[str, Any], recipe: Recipe) -> str:
    """Why this product stays what it is, "" when it becomes te.grouped_linear."""
    held = _held(node, weight)
    if reason := recipe_reason(recipe, held is not None) or left_as_plain(node, x, None if held else weight, offs):
        return reason
    ranks = (tensor_of(x).dim(), tensor_of(weight).dim())
    if ranks != ((3, 3) if offs is None else (2, 3)):
        return f"a grouped GEMM of {ranks[0]}-D by {ranks[1]}-D operands; te.grouped_linear takes tokens by experts, 2-D by 3-D"
    if origin_of(weight) is Origin.PRODUCT:
        return why_no_linear(x, weight)
    if given.get("bias") is not None:
        return "a grouped GEMM with a bias; add the bias to its result"
    transposed = _stored_transposed(node, weight)
    if reason := dtype_reason(node, x, weight) or shape_reason(tensor_of(weight).shape, recipe, transposed):
        return reason
    has_none = any(fixed(size) == 0 for size in tensor_of(x).shape[:-1])
    return "its input has no rows" if has_none and not _travels(x, recipe) else ""


def _travels(x: fx.Node, recipe: Recipe) -> bool:
    """Whether tokens come from other ranks, and may travel as codes: then all ranks call the same collectives, however few tokens one has."""
    if not recipe.input_quantizer().one_scale:
        return False
    seen, waiting = {x}, [x]
    while waiting:
        node = waiting.pop()
        if "all_to_all" in name_of(node):
            return True
        new = set(node.all_input_nodes) - seen
        waiting += new
        seen |= new
    return False


def _cost_reason(node: fx.Node, x: fx.Node, weight: fx.Node, recipe: Recipe) -> str:
    """Why FP8 would be slower than what the user wrote; "" where it is faster, and where nobody knows."""
    m, n, k = map(hint, _sizes(x, weight))
    value = tensor_of(node)
    if value.device.type != "cuda" or value.dtype not in FLOATS or not m or _travels(x, recipe):
        return ""
    groups = fixed(tensor_of(weight).shape[0]) or 1
    missing, inner = _paddings(tensor_of(weight).shape, recipe, _stored_transposed(node, weight))
    copied = groups * n * k * bool(missing or inner) + m * k * bool(inner)
    return experts_cost_reason(
        m,
        n + missing,
        k + inner,
        groups,
        recipe,
        value.requires_grad,
        rates_of(value.device),
        is_kept(weight) and not copied,
        value.dtype,
        copied,
    )


def recipe_reason(recipe: Recipe, stored: bool = False) -> str:
    """Why a recipe has no grouped linear, "" for one that has. stored: of weights that do not learn, quantized already."""
    reason = recipe.no_groups_reason(learns=not stored)
    return f"a grouped GEMM of a mixture's experts; {recipe.describe()}: {reason}" if reason else ""


def shape_reason(weight: Sequence[Any], recipe: Recipe, stored_transposed: bool) -> str:
    """Why a weight of that shape, [G, K, N], stays what it is; "" for one that te.grouped_linear takes.

    stored_transposed: whether the weight lies in memory as [G, K, N], not as [G, N, K].
    """
    groups, k, n = map(fixed, weight)
    if groups is None or n is None or k is None:
        return f"its weight has the dynamic shape {list(weight)}; te.grouped_linear needs G, N and K fixed"
    if reason := alignment_reason(n, k, recipe):
        return reason
    name, rows, multiple = *(("K", k) if stored_transposed else ("N", n)), _first_multiple(recipe)
    if (rows + padding(rows, multiple)) % multiple:
        return (
            f"{name} = {rows}: {recipe.gemms} of experts need {name} to be a multiple of {multiple}, where experts share no block of "
            "scales"
        )
    return "" if groups else "it has no experts"


def _first_multiple(recipe: Recipe) -> int:
    """What the second dimension of the weights as they lie in memory is a multiple of: no two experts have a part of one block of scales."""
    return math.lcm(recipe.alignment, recipe.weight_quantizer().experts_begin_at())


def _paddings(weight: Sequence[Any], recipe: Recipe, stored_transposed: bool) -> tuple[int, int]:
    """What is missing of N and K; the arguments are those of `shape_reason`."""
    _, k, n = map(fixed, weight)
    first, other = _first_multiple(recipe), recipe.alignment
    of_n, of_k = (other, first) if stored_transposed else (first, other)
    return padding(n or 0, of_n), padding(k or 0, of_k)
