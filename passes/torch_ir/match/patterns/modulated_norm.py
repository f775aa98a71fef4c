"""A LayerNorm times and plus what the model computed for each sample (adaLN) -> te.layer_norm_modulate.

    y = layer_norm(x, (K,)) * (1 + scale) + shift     ->    y = te.layer_norm_modulate(x, scale, shift, eps, True)[0]

x is [B, .., K], scale and shift are [B, 1, .., K], as in DiT, Flux and Stable Diffusion 3. A factor without the 1 is taken as it is.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from te_dynamo.passes.torch_ir.match.patterns.formulas import ADD, MUL
from te_dynamo.passes.torch_ir.match.patterns.norm import Norm, before_casts, called_norm, replace_norm
from te_dynamo.passes.torch_ir.match.readers import with_one_row
from te_dynamo.passes.torch_ir.match.values import calls, dtype_name, sole_user, tensor_of
from te_dynamo.passes.torch_ir.match.where import record
from te_dynamo.report import MatchRecord


def match_modulated_norm(node: fx.Node) -> MatchRecord | None:
    """Replaces a modulated LayerNorm where that pays; None when `node` is not the last operation of one."""
    for product, bias in _operands(node, ADD):
        for normed, weight in _operands(product, MUL):
            norm = _layer_norm(normed)
            if norm is not None and sole_user(normed) is product and sole_user(product) is node:
                modulated = _modulated(norm, product, weight, bias, node)
                if (
                    modulated is not None
                    and (dtype := tensor_of(before_casts(norm.x)[0]).dtype) != tensor_of(node).dtype
                ):
                    reason = f"it is {dtype_name(tensor_of(node).dtype)} of a {dtype_name(dtype)} input, of which backward would save a copy"
                    return record(modulated.kind, with_one_row(modulated.nodes), f"{reason}; left to Inductor")
                return None if modulated is None else replace_norm(modulated)
    return None


def _layer_norm(normed: fx.Node) -> Norm | None:
    """The LayerNorm without weight and bias that gives `normed`."""
    for node in (normed, *normed.args[:1]):
        norm = called_norm(node) if isinstance(node, fx.Node) else None
        if isinstance(norm, Norm) and norm.last is normed and norm.kind == "layer_norm" and not any(norm.weights):
            return norm
    return None


def _modulated(norm: Norm, product: fx.Node, weight: fx.Node, bias: fx.Node, last: fx.Node) -> Norm | None:
    """The norm with weight and bias; None where they are not one row for each sample."""
    x = tensor_of(norm.x)
    if x is None or x.dim() < 3:
        return None
    one_row = (x.shape[0], *[1] * (x.dim() - 2), x.shape[-1])
    if any(tensor_of(parameter).shape != one_row for parameter in (weight, bias)):
        return None
    scale = _scale_of(weight)
    raised = () if scale is None else (weight,)
    nodes = tuple(sorted((*raised, *norm.nodes, product, last)))
    return Norm("layer_norm_modulate", norm.x, (scale or weight, bias), (*norm.options, scale is not None), nodes)


def _scale_of(weight: fx.Node) -> fx.Node | None:
    """scale of 1 + scale; None of anything else."""
    if not calls(weight, *ADD) or weight.kwargs or len(weight.args) != 2:
        return None
    for one, scale in (weight.args, weight.args[::-1]):
        if isinstance(one, (int, float)) and one == 1 and isinstance(scale, fx.Node) and tensor_of(scale) is not None:
            return scale
    return None


def _operands(node: Any, operation: tuple[set[Any], set[str]]) -> list[tuple[fx.Node, fx.Node]]:
    """The two tensors of a sum or a product, in both orders."""
    if not calls(node, *operation) or node.kwargs or len(node.args) != 2:
        return []
    a, b = node.args
    return [(a, b), (b, a)] if tensor_of(a) is not None and tensor_of(b) is not None else []
