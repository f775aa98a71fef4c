"""A linear, however it is written (products.py) -> te.linear, for every one that a recipe covers and its GEMMs can take.

    y = torch._C._nn.linear(x, weight, bias)    ->    y = te.linear(x, weight, bias, LinearConfig(...))[0]
    y = torch.addmm(bias, x, weight)            ->    the same with LinearConfig(weight_transposed=True)

A weight that is a QuantizedTensor in the recipe's format is multiplied as it is, whatever FP8 costs (passes/torch_ir/quantized_weights.py).

Under autocast the result has another dtype than the operands; the casts that autocast would make become
nodes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from te_dynamo.dialect.linear import LinearConfig
from te_dynamo.kernels.runtime.availability import why_no_kernels
from te_dynamo.kernels.runtime.target import target_of
from te_dynamo.passes.torch_ir.match.autocast import autocast_around, may_be_autocast
from te_dynamo.passes.torch_ir.match.cost import (
    LEFT_FOR_COST,
    is_dropped,
    is_kept,
    linear_cost_reason,
    linear_times,
    waiting_for_cpu,
)
from te_dynamo.passes.torch_ir.match.mutation import reads_through
from te_dynamo.passes.torch_ir.match.patterns.linears.contractions import emit_contraction
from te_dynamo.passes.torch_ir.match.patterns.linears.fp32 import kept_in_fp32
from te_dynamo.passes.torch_ir.match.patterns.linears.padding import (
    alignment_reason,
    columns_of,
    padded,
    padded_rows,
    padding,
)
from te_dynamo.passes.torch_ir.match.patterns.linears.products import Product, Sizes, product_of, transpositions
from te_dynamo.passes.torch_ir.match.patterns.linears.shards import is_shared, layout_of, local, to_shards
from te_dynamo.passes.torch_ir.match.patterns.linears.stored import (
    check_inference,
    check_scaled,
    give_back,
    read_torchao,
    reads,
    recipe_of_stored,
    static_amax,
)
from te_dynamo.passes.torch_ir.match.values import (
    FLOATS,
    calls,
    dtype_name,
    emit,
    emit_getitem,
    emit_method,
    erase_unused,
    fixed,
    hint,
    left_as_plain,
    put_back,
    quantized_of,
    replace,
    tensor_of,
    times_mapped,
)
from te_dynamo.passes.torch_ir.match.where import emulated_on, linear_path, source_line
from te_dynamo.quantized.tensor import QuantizedTensor
from te_dynamo.rates import rates_of
from te_dynamo.recipe import Recipe
from te_dynamo.report import RECORD, MatchRecord

RecipeFor = Callable[[str, str], tuple[Recipe | None, str]]
"""(recipe, which rule chose it or why it is None) by `linear_path`."""


def match_linear(node: fx.Node, recipe_for: RecipeFor, outside: str = "") -> list[MatchRecord]:
    """Replaces `node` by te.linear where it is a linear that may become one; its record, or none for any other node.

    recipe_for: (recipe, which rule chose it or why it is None) by `linear_path`.
    outside: a reason that holds for the whole graph (a body that is not rewritten), "" normally.
    """
    product = product_of(node)
    if product is None:
        return []
    weight, stored, unread = read_torchao(node, product.weight)
    product = dataclasses.replace(product, weight=weight)
    record, recipe = linear_record(node, weight, product.sizes, recipe_for)
    if recipe is not None:
        check_scaled(product.weight, record)
        check_inference(node, product.weight, recipe, record)
        named = named_by_rule(recipe_for, record.module, record.parameter)
        record.us = estimated_times(node, product, recipe)
        record.reason = outside or product.reason or unread or _rewrite(node, product, recipe, named)
    if recipe is None or record.reason:
        record.matched, record.recipe, record.us = False, "", 2 * record.us[:1]
        give_back(node, weight, stored)
    else:
        record.stored = stored
    return [record]


def _rewrite(node: fx.Node, product: Product, recipe: Recipe, named: bool) -> str:
    """Puts te.linear in the place of `node`; the reason where it has to stay, "" where it is gone.

    named: whether a rule chose the recipe for it, whatever it costs.
    """
    operands = (product.x, product.weight, product.bias)
    if not all(isinstance(operand, fx.Node) for operand in operands if operand is not None) or None in operands[:2]:
        return "its operands are not all tensors of the graph"
    if product.contraction is not None:
        return _rewrite_contraction(node, product, recipe, named)
    if any(map(is_shared, operands)):
        return _rewrite_shards(node, product, recipe, named)
    if reason := _reason(node, product, recipe):
        return reason
    if not named and (reason := _fp32_reason(node, product)):
        node.meta[LEFT_FOR_COST] = ""  # it shares no x
        return reason
    if not named and (reason := _cost_reason(node, product, recipe)):
        node.meta[LEFT_FOR_COST] = reason
        return reason
    _replace(node, product, recipe)
    return ""


def becomes_fp8(node: fx.Node, product: Product, recipe: Recipe, named: bool) -> bool:
    """Whether `match_linear` puts te.linear in its place, as far as the node tells before anything is rewritten."""
    operands = (product.x, product.weight, product.bias)
    if any(map(is_shared, operands)):
        if product.transposed or isinstance(layout_of(*operands), str):
            return False
    elif product.contraction is None and (product.reason or _reason(node, product, recipe)):
        return False
    return named or not (_fp32_reason(node, product) or _cost_reason(node, product, recipe))


def _rewrite_shards(node: fx.Node, product: Product, recipe: Recipe, named: bool) -> str:
    if product.transposed:
        return "a DTensor stored as [K, N]; write F.linear or nn.Linear to have it in the recipe"
    layout = layout_of(product.x, product.weight, product.bias)
    if isinstance(layout, str):
        return layout
    with node.graph.inserting_before(node):
        linear, whole = to_shards(layout, product.x, product.weight, product.bias, node)
    node.meta[LEFT_FOR_COST] = ""  # x has one reader here, not two
    shards = product_of(linear)
    assert shards is not None
    if reason := _rewrite(linear, shards, recipe, named):
        node.meta[LEFT_FOR_COST] = linear.meta.get(LEFT_FOR_COST, "")
        erase_unused(node.graph, [whole, linear, *filter(None, (shards.x, shards.weight, shards.bias))])
        return f"of its shards: {reason}"
    replace(node, whole)
    erase_unused(node.graph, [node])
    return ""


def _rewrite_contraction(node: fx.Node, product: Product, recipe: Recipe, named: bool) -> str:
    assert product.contraction is not None
    if reason := left_as_plain(node, product.x, product.weight):
        return reason
    before = node.prev
    with node.graph.inserting_before(node), autocast_around(node):
        linear, whole = emit_contraction(node, *product.contraction)
    node.meta[LEFT_FOR_COST] = ""  # x has one reader here, not two
    inner = product_of(linear)
    replace(node, whole)  # now, for its readers decide which strides it may have
    reason = "its operands are no tensors" if inner is None else _rewrite(linear, inner, recipe, named)
    if reason:
        node.meta[LEFT_FOR_COST] = linear.meta.get(LEFT_FOR_COST, "")
        put_back(node, whole, before)
        return reason
    erase_unused(node.graph, [node])
    return ""


def _replace(node: fx.Node, product: Product, recipe: Recipe) -> None:
    out, x, weight = tensor_of(node), product.x, product.weight
    batch_first = _before_swap(node, x) if recipe.input_quantizer().one_scale else None
    config = _config(node, product, recipe)
    graph, written = node.graph, node.all_input_nodes
    n, k = out.shape[-1], fixed(tensor_of(x).shape[-1]) or 0
    missing, inner = padding(n, recipe.alignment), padding(k, recipe.alignment)
    with graph.inserting_before(node):
        x, weight, bias = (o and cast(o, out.dtype, node) for o in (batch_first or x, weight, product.bias))
        if inner:
            x = padded_rows(x, inner, node)
            weight = padded(weight, inner, 0 if product.transposed else 1, node)
        if missing:
            weight = padded(weight, missing, 1 if product.transposed else 0, node)
            bias = bias and padded(bias, missing, 0, node)
        saved = emit(graph, torch.ops.te.linear.default, (x, weight, bias, config), node)
        new = emit_getitem(graph, saved, 0)
        new = columns_of(new, node)
        if batch_first is not None:
            new = emit_method(graph, "contiguous", (emit_method(graph, "transpose", (new, 0, 1), node),), node)
    replace(node, new)
    swaps = [product.x] if batch_first is not None else []
    erase_unused(graph, [node, *swaps, *dict.fromkeys(view for operand in written for view in transpositions(operand))])


def _config(node: fx.Node, product: Product, recipe: Recipe) -> LinearConfig:
    out, x, weight = tensor_of(node), tensor_of(product.x), tensor_of(product.weight)
    held = quantized_of(product.weight)
    plain = held is not None and held.quantizer != held.quantizer.for_block_scales()
    return LinearConfig.from_recipe(
        recipe,
        input_requires_grad=out.requires_grad and x.requires_grad,
        weight_requires_grad=out.requires_grad and weight.requires_grad,
        weight_transposed=product.transposed,
        device=None if plain else x.device,
        input_amax=static_amax(product.weight, recipe),
    )


def _before_swap(reader: fx.Node, x: fx.Node) -> fx.Node | None:
    """y [B, T, K], of which x is y.transpose(0, 1): what nn.MultiheadAttention makes of a batch-first input; else None.

    One scale a tensor has the same bits in either order, so y is what is read: no copy, and a norm that makes y writes FP8.
    """
    dims = x.args[1:] if calls(x, {torch.transpose}, {"transpose"}) and not x.kwargs else ()
    y = tensor_of(x.args[0]) if dims in ((0, 1), (1, 0)) else None
    swapped = y is not None and y.dim() == 3 and y.is_contiguous() and reads_through(reader, x)
    return x.args[0] if swapped else None  # type: ignore[return-value]


def cast(operand: fx.Node, dtype: torch.dtype, like: fx.Node) -> fx.Node:
    """The operand in that dtype, as autocast would give it to the product, at the graph's insert point."""
    if tensor_of(operand).dtype == dtype:
        return operand
    return emit_method(like.graph, "to", (operand, dtype), like)


def _reason(node: fx.Node, product: Product, recipe: Recipe) -> str:
    """Why this linear stays what it is, "" when it becomes te.linear."""
    x, weight, bias = product.x, product.weight, product.bias
    held = quantized_of(weight)
    return (
        left_as_plain(node, x, bias, weight if held is None else None)
        or dtype_reason(node, x, weight, bias)
        or _shape_reason(x, weight, bias, recipe, product.transposed)
        or ("" if held is None else _format_reason(held, node, product, recipe))
    )


def _format_reason(held: QuantizedTensor, node: fx.Node, product: Product, recipe: Recipe) -> str:
    """Why the GEMMs of the recipe do not multiply by a weight that is quantized already."""
    read, there = _config(node, product, recipe).weight_quantizer, held.quantizer
    if not reads(read, there):
        return f"its weight is {there.in_words()}; {recipe.describe()} multiplies by {read.in_words()}"
    made = there.rowwise and there.columns_are_rows()
    if read.rowwise and not there.rowwise:
        return "its weight was quantized columnwise alone; forward reads rowwise data too"
    if read.columnwise and not (there.columnwise or made):
        return "its weight was quantized rowwise alone; backward reads columnwise data too"
    if any(padding(size, recipe.alignment) for size in tensor_of(product.weight).shape):
        sizes = list(tensor_of(product.weight).shape)
        return f"its weight is quantized and of its sizes {sizes} one is no multiple of {recipe.alignment}"
    return ""


def dtype_reason(node: fx.Node, x: fx.Node, weight: fx.Node, bias: fx.Node | None = None) -> str:
    """Why a product of operands in those dtypes stays what it is, "" where all are one, or autocast casts them."""
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


def _shape_reason(x: fx.Node, weight: fx.Node, bias: fx.Node | None, recipe: Recipe, transposed: bool) -> str:
    shape, rank = tensor_of(weight).shape, tensor_of(x).dim()
    if len(shape) != 2 or rank < 1:
        return f"its weight has {len(shape)} dimensions and its input {rank}: no product by a matrix"
    n, k = map(fixed, reversed(shape) if transposed else shape)
    if n is None or k is None:
        return f"its weight has the dynamic shape {list(shape)}; te.linear needs N and K fixed"
    if bias is not None and tuple(tensor_of(bias).shape) != (n,):
        return f"its bias has shape {list(tensor_of(bias).shape)}; expected [{n}]"
    if reason := alignment_reason(n, k, recipe):
        return reason
    if any(fixed(size) == 0 for size in tensor_of(x).shape[:-1]) and not _only_fp8(weight):
        return "its input has no rows"
    return ""


def _only_fp8(weight: fx.Node) -> bool:
    """Whether there is nothing but codes: a rank that has no tokens multiplies nothing by them too."""
    return is_dropped(weight) or quantized_of(weight) is not None


def _fp32_reason(node: fx.Node, product: Product) -> str:
    """`kept_in_fp32` of a linear; "" where nothing but FP8 can multiply by its weight."""
    only_fp8 = _only_fp8(product.weight)
    return "" if only_fp8 else kept_in_fp32(node, product.x, product.weight)


def _cost_reason(node: fx.Node, product: Product, recipe: Recipe) -> str:
    """Why FP8 would be slower than what the user wrote; "" where it is faster, and where nobody knows."""
    if not _has_times(node, product) or _only_fp8(product.weight):
        return ""
    return linear_cost_reason(**_costs(node, product, recipe)) or (
        "" if is_kept(product.weight) else waiting_for_cpu.get()
    )


def estimated_times(node: fx.Node, product: Product, recipe: Recipe) -> tuple[float, ...]:
    """(us in the model's precision, us in the recipe), () where nobody knows."""
    if not isinstance(product.x, fx.Node) or not isinstance(product.weight, fx.Node) or not _has_times(node, product):
        return ()
    return linear_times(**_costs(node, product, recipe))


def _costs(node: fx.Node, product: Product, recipe: Recipe) -> dict[str, Any]:
    """What the rule of what FP8 costs is asked with."""
    x, weight = product.x, product.weight
    m, n, k = map(hint, product.sizes)
    missing, inner = padding(n, recipe.alignment), padding(k, recipe.alignment)
    kept = is_kept(weight) or (quantized_of(weight) is not None and not tensor_of(weight).requires_grad)
    return {
        "m": m,
        "n": n + missing,
        "k": k + inner,
        "gemms": _gemms(node, product, recipe),
        "recipe": recipe,
        "rates": rates_of(tensor_of(node).device),
        "weight_readers": len(weight.users),
        "x_readers": readers_of(x),
        "kept": kept and not missing and not inner,
        "dtype": tensor_of(node).dtype,
    }


def _has_times(node: fx.Node, product: Product) -> bool:
    out = tensor_of(node)
    return (
        out is not None
        and out.device.type == "cuda"
        and out.dtype in FLOATS
        and bool(product.sizes)
        and hint(product.sizes[0]) > 0
    )


def _gemms(node: fx.Node, product: Product, recipe: Recipe) -> list[str]:
    """Which of its GEMMs are quantized."""
    trains = tensor_of(node).requires_grad
    read = True, trains and tensor_of(product.x).requires_grad, trains and tensor_of(product.weight).requires_grad
    asked = zip(("fprop", "dgrad", "wgrad"), read, recipe.quantizes(), strict=True)
    return [gemm for gemm, is_read, is_quantized in asked if is_read and is_quantized]


def readers_of(x: fx.Node) -> int:
    """How many linears share the quantized x, one at least. Each linear of a DTensor has a node of its own for this rank's shard."""
    if x.target is local:
        whole: Any = x.args[0]
        return max(1, sum(_readers_here(user) if user.target is local else _reads(user, whole) for user in whole.users))
    return max(1, _readers_here(x))


def _readers_here(x: fx.Node) -> int:
    return sum(_reads(user, x) for user in x.users)


def _reads(node: fx.Node, x: fx.Node) -> bool:
    """Whether it is a linear of x that shares its quantized copy: one in FP8 already, or one that is not yet asked."""
    if calls(node, {torch.ops.te.linear.default}):
        return node.args[0] is x
    product = None if LEFT_FOR_COST in node.meta else product_of(node)
    return product is not None and product.x is x


def chosen_recipe(node: fx.Node, weight: Any, recipe_for: RecipeFor) -> tuple[Recipe | None, str]:
    """What `recipe_for` says of a linear; the recipe of a weight that came quantized from a file, where no rule says another.

    One that learns did not: FSDP gathered it as it was asked to, and the linear has to ask for the same.
    """
    recipe, why = recipe_for(*linear_path(node, weight))
    held = quantized_of(weight)
    if held is None or recipe is None or tensor_of(weight).requires_grad:
        return recipe, why
    return recipe_of_stored(held.quantizer, recipe, why != "", tensor_of(node).requires_grad), why


def linear_record(node: fx.Node, weight: Any, sizes: Sizes, recipe_for: RecipeFor) -> tuple[MatchRecord, Recipe | None]:
    """The record as if matched, and the recipe that applies: none on a GPU without kernels, unless a rule names the linear."""
    path, parameter = linear_path(node, weight)
    record = MatchRecord("linear", path, source_line(node), parameter=parameter)
    recipe, why = chosen_recipe(node, weight, recipe_for)
    value = next((v for v in (tensor_of(node), tensor_of(weight)) if v is not None), None)
    if recipe is not None and why == "" and value is not None and value.device.type == "cuda":
        why = why_no_kernels(target_of(value.device))
        recipe = None if why else recipe
    record.reason = why if recipe is None else ""
    record.recipe = "" if recipe is None else recipe.describe()
    record.emulated_on = emulated_on(recipe, value)
    record.dtype = "" if value is None else dtype_name(value.dtype)
    if sizes and value is not None:
        sizes = (sizes[0] * times_mapped(value), *sizes[1:])
    record.shape = tuple(map(str, sizes))
    record.flops = 2 * math.prod(map(hint, sizes)) if sizes else 0
    node.meta[RECORD] = record  # a te node in its place inherits it
    return record, recipe


def named_by_rule(recipe_for: RecipeFor, path: str, parameter: str) -> bool:
    """Whether the recipe of a linear is a rule's choice, not that of the whole model."""
    recipe, why = recipe_for(path, parameter)
    return recipe is not None and why != ""
