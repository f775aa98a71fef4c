"""The ways in which a model writes a linear, read as x, weight and bias.

    F.linear(x, weight, bias)                        weight [N, K]
    x @ weight, torch.matmul, torch.mm               a 2-D weight [K, N], made of parameters alone (origins.py)
    torch.addmm(bias, x, weight)                     the same; GPT-2's Conv1D
    torch.einsum, torch.tensordot, torch.inner       letters.py
    weight @ x, x @ weight[None]                     the same
    F.conv2d of 1x1, of patches                      convolutions.py
    x @ weight.t(), .T, .mT, transpose(0, 1)         the parameter as it is stored, [N, K]

A product of two tensors that depend on the model's input, such as attention's, is none of these. A linear in a form that te.linear does not compute
(alpha=2) comes with the reason.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from te_dynamo._compat import attribute_read
from te_dynamo.distributed.fp8_all_gather_shard import local_of
from te_dynamo.passes.torch_ir.match.mutation import reads_through
from te_dynamo.passes.torch_ir.match.origins import Origin, origin_of
from te_dynamo.passes.torch_ir.match.patterns.linears.contractions import Contraction
from te_dynamo.passes.torch_ir.match.patterns.linears.convolutions import contraction_of_convolution
from te_dynamo.passes.torch_ir.match.patterns.linears.letters import MATMUL, MATMUL_METHODS, contraction_of, factors_of
from te_dynamo.passes.torch_ir.match.values import arguments, calls, fixed, spells, tensor_of

Sizes = tuple[Any, ...]
"""(M, N, K), each an int or a SymInt; () where the graph does not say."""

_aten = torch.ops.aten

LINEAR = {F.linear, torch._C._nn.linear, _aten.linear, _aten.linear.default}

# The overloads are those of a model that torch.export has decomposed.
_ADDMM = {torch.addmm, _aten.addmm, _aten.addmm.default}
_ADDMV = {torch.addmv, _aten.addmv, _aten.addmv.default}
_SWAPS = {torch.transpose, torch.swapaxes, torch.swapdims, _aten.transpose.int}
_PERMUTES = {torch.permute, _aten.permute.default}
_SWAP_METHODS = {"transpose", "swapaxes", "swapdims"}
_TRANSPOSED = {torch.t, _aten.t.default} | _PERMUTES | _SWAPS
_TRANSPOSED_METHODS = {"t", "permute"} | _SWAP_METHODS
_TRANSPOSED_ATTRIBUTES = {"T", "mT"}
_CAST_METHODS = {"to", "type_as", "float", "bfloat16", "half"}


@dataclasses.dataclass(frozen=True)
class Product:
    """One linear: y = x @ weight^T + bias, the weight as it is stored.

    transposed: the weight is [K, N].
    reason: why te.linear does not compute it, "" where it may.
    contraction: of a product by letters these, and which operand is the weight; None for any other.
    """

    x: Any
    weight: Any
    bias: Any
    transposed: bool
    sizes: Sizes
    reason: str = ""
    contraction: tuple[Contraction, int] | None = None


def product_of(node: fx.Node) -> Product | None:
    """The linear that a node is; None for any other node."""
    if spells(node, LINEAR):
        given = arguments(node, "input", "weight", "bias") or {}
        x, weight = given.get("input"), given.get("weight")
        found: Product | None = Product(x, weight, given.get("bias"), False, _sizes(x, weight))
    elif spells(node, _ADDMM | _ADDMV, {"addmm", "addmv"}) and contraction_by_weight(node) is None:
        found = _addmm(node)
    elif spells(node, MATMUL, MATMUL_METHODS) and contraction_by_weight(node) is None:
        given = factors_of(node)
        found = _matmul(given.get("input"), given.get("other"), _writes(given))
    else:
        return _contraction(node)
    return found and _as_stored(node, found)


def without_casts(node: Any) -> fx.Node | None:
    """The tensor below transposes and casts; None for what is no node."""
    while isinstance(node, fx.Node) and (
        calls(node, _TRANSPOSED, _TRANSPOSED_METHODS | _CAST_METHODS) or attribute_read(node) in _TRANSPOSED_ATTRIBUTES
    ):
        node = node.args[0]
    return node if isinstance(node, fx.Node) else None


def is_parameter(node: Any, rank: int | None = None) -> bool:
    """Whether an operand, of that rank, is a weight: made of parameters alone, or a leaf that learns, below transposes and casts."""
    value = tensor_of(node)
    if value is None or (rank is not None and value.dim() != rank):
        return False
    return origin_of(node) in (Origin.PARAMETER, Origin.PRODUCT) or _is_leaf_that_learns(without_casts(node))


def _is_leaf_that_learns(node: fx.Node | None) -> bool:
    leaf = tensor_of(node)
    return leaf is not None and node.op == "placeholder" and leaf.is_leaf and leaf.requires_grad  # type: ignore[union-attr]


def takes_groups(x: Any, weight: Any) -> bool:
    """Whether x @ weight is a product of each group's tokens with its own weight: [G, m, K] by [G, K, N]."""
    a, b = tensor_of(x), tensor_of(weight)
    return a is not None and b is not None and a.dim() == b.dim() == 3 and fixed(a.shape[0]) == fixed(b.shape[0])


def transpositions(node: Any) -> list[fx.Node]:
    """The transpositions of a matrix that `node` is, the outermost first; [] for any other node."""
    found = []
    while _is_transposition(node):
        found.append(node)
        node = node.args[0]
    return found


def _as_stored(node: fx.Node, product: Product) -> Product:
    """The same linear of the weight below the transpositions that the user wrote for it."""
    views = transpositions(product.weight)
    if not views or not reads_through(node, *views):
        return product
    return dataclasses.replace(
        product, weight=views[-1].args[0], transposed=product.transposed != (len(views) % 2 == 1)
    )


def _is_transposition(node: Any) -> bool:
    """Whether it is the transpose of a matrix."""
    if not isinstance(node, fx.Node) or not node.args or node.kwargs:
        return False
    value = tensor_of(node.args[0])
    if value is None or value.dim() != 2:
        return False
    if attribute := attribute_read(node):
        return attribute in _TRANSPOSED_ATTRIBUTES
    dims: tuple[Any, ...] = node.args[1:]
    if calls(node, _SWAPS, _SWAP_METHODS):
        return len(dims) == 2 and all(isinstance(d, int) for d in dims) and {d % 2 for d in dims} == {0, 1}
    if calls(node, _PERMUTES, {"permute"}):
        order = dims[0] if len(dims) == 1 and isinstance(dims[0], (tuple, list)) else dims
        return len(order) == 2 and all(isinstance(d, int) for d in order) and [d % 2 for d in order] == [1, 0]
    return calls(node, _TRANSPOSED, {"t"})


def _addmm(node: fx.Node) -> Product | None:
    name, factors = ("addmv", ("mat", "vec")) if calls(node, _ADDMV, {"addmv"}) else ("addmm", ("mat1", "mat2"))
    given = arguments(node, "input", *factors, "beta", "alpha", "out")
    if given is None or len(node.args) > 3:  # alpha and beta by position, a signature that torch deprecates
        return None
    scaled = any(given.get(factor, 1) != 1 for factor in ("alpha", "beta"))
    reason = f"torch.{name} with alpha or beta; write the factors outside of it" if scaled else _writes(given)
    found = _matmul(given.get(factors[0]), given.get(factors[1]), reason)
    return found and dataclasses.replace(found, bias=given.get("input"))


def _writes(given: dict[str, Any]) -> str:
    return "it writes to out=" if given.get("out") is not None else ""


def _matmul(left: Any, right: Any, reason: str) -> Product | None:
    a, b = tensor_of(left), tensor_of(right)
    if a is None or b is None or a.dim() < 1 or b.dim() < 1:
        return None
    position = _position_of_weight(left, right)
    if position is None:
        return None
    batch = math.prod(torch.broadcast_shapes(a.shape[:-2], b.shape[:-2]))
    m, n = a.shape[-2] if a.dim() > 1 else 1, b.shape[-1] if b.dim() > 1 else 1
    if position == 1:
        return Product(left, right, None, True, (batch * m, n, a.shape[-1]), reason or why_no_linear(left, right))
    # the columns of x are the rows of a linear
    reason = reason or ("written as weight @ x, of one vector" if b.dim() == 1 else "written as weight @ x")
    return Product(right, left, None, False, (batch * n, m, a.shape[-1]), reason)


def _position_of_weight(*operands: Any) -> int | None:
    """Which of two operands is the weight: a model's parameter rather than an input that learns, a parameter rather than what products
    made of some, the right rather than the left."""
    weights = [i for i in (1, 0) if is_parameter(operands[i])]
    return min(weights, key=lambda i: origin_of(operands[i]), default=None)


def why_no_linear(x: Any, weight: Any) -> str:
    """Why x @ weight may be something else than a linear; "" where it is one."""
    origin = origin_of(weight)
    if origin is Origin.INPUT:
        return "its weight is an input that learns, no nn.Parameter; write F.linear to have it in the recipe"
    if origin is Origin.PRODUCT:
        return "its weight is a product of parameters; write F.linear to have it in the recipe"
    both = origin_of(x) in (Origin.PARAMETER, Origin.PRODUCT)
    return "a product of two parameters, no linear of an input" if both else ""


def _sizes(x: Any, weight: Any, transposed: bool = False) -> Sizes:
    a, b = local_of(tensor_of(x)), local_of(tensor_of(weight))
    if a is None or b is None or a.dim() < 1 or b.dim() != 2:
        return ()
    rows = a.values().shape[:-1] if a.is_nested else a.shape[:-1]
    return (math.prod(rows), b.shape[1 if transposed else 0], a.shape[-1])


def contraction_by_weight(node: fx.Node) -> tuple[Contraction, int] | None:
    """The product by letters that a node is, and which operand is the weight; None for x @ weight [K, N] too, which needs no letters."""
    found = contraction_of(node) or contraction_of_convolution(node)
    index = _position_of_weight(*found.operands) if found is not None else None
    if found is None or index is None:
        return None
    plain = (
        spells(node, MATMUL | _ADDMM, MATMUL_METHODS | {"addmm"})
        and index == 1
        and tensor_of(found.operands[1]).dim() == 2
    )
    return None if plain else (found, index)


def _contraction(node: fx.Node) -> Product | None:
    found, index = contraction_by_weight(node) or (None, 0)
    if found is None or found.groups(index):
        return None
    x, weight = found.operands[1 - index], found.operands[index]
    return Product(
        x, weight, None, False, found.sizes(index), why_no_linear(x, weight) or found.reason(index), (found, index)
    )
