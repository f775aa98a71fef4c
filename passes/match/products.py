"""Linears that a model does not write as linears: recorded, so that none is silent, and left as they are.

    x @ weight, torch.matmul, torch.mm, torch.addmm (GPT-2's Conv1D)     a product with a 2-D parameter
    torch.einsum("btd,dn->btn", x, weight)                               the same
    F.multi_head_attention_forward                                       nn.MultiheadAttention's projections

Attention's own products have no parameter and are none of these.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from te_dynamo.passes.match.values import calls, tensor_of

__all__ = ["Product", "Sizes", "is_parameter", "products_of", "without_casts"]

Sizes = tuple[Any, ...]
"""(M, N, K), each an int or a SymInt; () where the graph does not say."""

_MATMUL = {torch.matmul, torch.mm, operator.matmul}
_MATMUL_METHODS = {"matmul", "mm", "__matmul__"}
# Dynamo spells x.mT and x.T as getattr, from torch 2.14 on as these operations.
_TRANSPOSED = {torch.t, torch.transpose, torch.ops.aten.mT, torch.ops.aten.numpy_T}
_TRANSPOSED_METHODS = {"t", "transpose"}
_CAST_METHODS = {"to", "type_as", "float", "bfloat16", "half"}


@dataclasses.dataclass(frozen=True)
class Product:
    """One linear in another dress: its weight, its sizes and why it stays."""

    weight: Any  # the node of the weight
    sizes: Sizes
    reason: str


def products_of(node: fx.Node) -> list[Product]:
    """The linears that a node hides; none for any other node."""
    if calls(node, {torch.addmm}, {"addmm"}):
        mats = node.args[1:3] if len(node.args) >= 3 else (node.kwargs.get("mat1"), node.kwargs.get("mat2"))
        return _matmul(*mats)
    if calls(node, _MATMUL, _MATMUL_METHODS) and len(node.args) == 2:
        return _matmul(*node.args)
    if calls(node, {torch.einsum}):
        return _einsum(node)
    if calls(node, {F.multi_head_attention_forward}):
        return _attention(node)
    return []


def without_casts(node: Any) -> fx.Node | None:
    """The tensor below transposes and casts; None for what is no node."""
    while isinstance(node, fx.Node) and (
        calls(node, _TRANSPOSED, _TRANSPOSED_METHODS | _CAST_METHODS)
        or (calls(node, {getattr}) and node.args[1] in ("T", "mT"))
    ):
        node = node.args[0]
    return node if isinstance(node, fx.Node) else None


def _matmul(left: Any, right: Any) -> list[Product]:
    a, b = tensor_of(left), tensor_of(right)
    if a is None or b is None or a.dim() < 1 or b.dim() < 1:
        return []
    reason = "written as matmul; write F.linear or nn.Linear to have it in the recipe"
    if is_parameter(right):
        return [Product(right, (math.prod(a.shape[:-1]), b.shape[1], b.shape[0]), reason)]
    if is_parameter(left):  # weight @ x: the columns of x are the rows of a linear
        rows = math.prod(b.shape[:-2]) * (b.shape[-1] if b.dim() > 1 else 1)
        return [Product(left, (rows, a.shape[0], a.shape[1]), reason)]
    return []


def _einsum(node: fx.Node) -> list[Product]:
    equation, *operands = node.args
    if len(operands) == 1 and isinstance(operands[0], (tuple, list)):
        operands = list(operands[0])
    weight = next((o for o in operands if is_parameter(o)), None)
    if (
        weight is None
        or len(operands) != 2
        or not isinstance(equation, str)
        or any(tensor_of(o) is None for o in operands)
    ):
        return []
    sizes: Sizes = ()
    if "..." not in equation and "->" in equation:
        inputs, _, output = equation.replace(" ", "").partition("->")
        labels = inputs.split(",")
        extent = {
            c: s
            for o, term in zip(operands, labels, strict=True)
            for c, s in zip(term, tensor_of(o).shape, strict=True)
        }
        held = set(labels[operands.index(weight)])
        n, k = (math.prod(extent[c] for c in held if (c in output) == kept) for kept in (True, False))
        sizes = (math.prod(size for c, size in extent.items() if c not in held), n, k)
    return [Product(weight, sizes, "written as einsum; write F.linear or nn.Linear to have it in the recipe")]


def _attention(node: fx.Node) -> list[Product]:
    """q, k, v and output projection of nn.MultiheadAttention."""
    given = inspect.signature(F.multi_head_attention_forward).bind(*node.args, **node.kwargs).arguments
    width, reason = given["embed_dim_to_check"], "inside nn.MultiheadAttention; write its projections as nn.Linear"
    packed = given.get("in_proj_weight")
    found = []
    for name in ("query", "key", "value"):
        x, weight = tensor_of(given[name]), packed if packed is not None else given.get(f"{name[0]}_proj_weight")
        sizes = () if x is None else (math.prod(x.shape[:-1]), width, x.shape[-1])
        found.append(Product(weight, sizes, reason))
    query = found[0].sizes
    return [*found, Product(given["out_proj_weight"], query and (query[0], width, width), reason)]


def is_parameter(node: Any, rank: int = 2) -> bool:
    """Whether an operand of that rank is a weight: a parameter, or a leaf that learns, below transposes and casts."""
    weight, value = without_casts(node), tensor_of(node)
    if weight is None or value is None or value.dim() != rank or weight.op not in ("placeholder", "get_attr"):
        return False
    held = isinstance(weight.type, type) and issubclass(weight.type, torch.nn.Parameter)
    leaf = tensor_of(weight)
    return held or "_parameters_" in str(weight.target) or (leaf is not None and leaf.is_leaf and leaf.requires_grad)
