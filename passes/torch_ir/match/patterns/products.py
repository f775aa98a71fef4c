"""The ways in which a model writes a linear, read as x, weight and bias.

    F.linear(x, weight, bias)                        weight [N, K]
    x @ weight, torch.matmul, torch.mm               a 2-D parameter [K, N]
    torch.addmm(bias, x, weight)                     the same; GPT-2's Conv1D
    torch.einsum("btd,dn->btn", x, weight)           the same, or [N, K] by "nd"
    x @ weight.t(), .T, .mT, transpose(0, 1)         the parameter as it is stored, [N, K]

Attention's own products have no parameter and are none of these. A linear in a form that te.linear does not compute
(weight @ x, alpha=2) comes with the reason.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from te_dynamo._compat import attribute_read
from te_dynamo.passes.torch_ir.match.values import arguments, calls, fixed, tensor_of

__all__ = ["LINEAR", "Product", "Sizes", "is_parameter", "product_of", "transpositions", "without_casts"]

Sizes = tuple[Any, ...]
"""(M, N, K), each an int or a SymInt; () where the graph does not say."""

_aten = torch.ops.aten

LINEAR = {F.linear, torch._C._nn.linear, _aten.linear.default}

# The overloads are those of a model that torch.export has decomposed.
_ADDMM = {torch.addmm, _aten.addmm.default}
_MATMUL = {torch.matmul, torch.mm, operator.matmul, _aten.matmul.default, _aten.mm.default}
_MATMUL_METHODS = {"matmul", "mm", "__matmul__"}
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
    """

    x: Any
    weight: Any
    bias: Any
    transposed: bool
    sizes: Sizes
    reason: str = ""


def product_of(node: fx.Node) -> Product | None:
    """The linear that a node is; None for any other node."""
    if calls(node, LINEAR):
        given = arguments(node, "input", "weight", "bias") or {}
        x, weight = given.get("input"), given.get("weight")
        found: Product | None = Product(x, weight, given.get("bias"), False, _sizes(x, weight))
    elif calls(node, _ADDMM, {"addmm"}):
        found = _addmm(node)
    elif calls(node, _MATMUL, _MATMUL_METHODS):
        second = "mat2" if node.target in (torch.mm, "mm") else "other"
        given = arguments(node, "input", second, "out") or {}
        found = _matmul(given.get("input"), given.get(second), _writes(given))
    else:
        found = _einsum(node) if calls(node, {torch.einsum}) else None
    return found and _as_stored(found)


def without_casts(node: Any) -> fx.Node | None:
    """The tensor below transposes and casts; None for what is no node."""
    while isinstance(node, fx.Node) and (
        calls(node, _TRANSPOSED, _TRANSPOSED_METHODS | _CAST_METHODS) or attribute_read(node) in _TRANSPOSED_ATTRIBUTES
    ):
        node = node.args[0]
    return node if isinstance(node, fx.Node) else None


def is_parameter(node: Any, rank: int = 2) -> bool:
    """Whether an operand of that rank is a weight: a parameter, or a leaf that learns, below transposes and casts."""
    weight, value = without_casts(node), tensor_of(node)
    if weight is None or value is None or value.dim() != rank or weight.op not in ("placeholder", "get_attr"):
        return False
    leaf = tensor_of(weight)
    return _is_module_parameter(weight) or (leaf is not None and leaf.is_leaf and leaf.requires_grad)


def _is_module_parameter(node: fx.Node | None) -> bool:
    """Whether an input of the graph is an nn.Parameter, of a body too, or what FSDP has in the place of one."""
    return node is not None and (
        isinstance(tensor_of(node), torch.nn.Parameter)
        or (isinstance(node.type, type) and issubclass(node.type, torch.nn.Parameter))
        or "_parameters_" in str(node.target)
    )


def transpositions(node: Any) -> list[fx.Node]:
    """The transpositions of a matrix that `node` is, the outermost first; [] for any other node."""
    found = []
    while _is_transposition(node):
        found.append(node)
        node = node.args[0]
    return found


def _as_stored(product: Product) -> Product:
    """The same linear of the weight below the transpositions that the user wrote for it."""
    views = transpositions(product.weight)
    weight = views[-1].args[0] if views else product.weight
    return dataclasses.replace(product, weight=weight, transposed=product.transposed != (len(views) % 2 == 1))


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
    given = arguments(node, "input", "mat1", "mat2", "beta", "alpha", "out")
    if given is None or len(node.args) > 3:  # alpha and beta by position, a signature that torch deprecates
        return None
    scaled = any(given.get(name, 1) != 1 for name in ("alpha", "beta"))
    reason = "torch.addmm with alpha or beta; write the factors outside of it" if scaled else _writes(given)
    found = _matmul(given.get("mat1"), given.get("mat2"), reason)
    return found and dataclasses.replace(found, bias=given.get("input"))


def _writes(given: dict[str, Any]) -> str:
    return "it writes to out=" if given.get("out") is not None else ""


def _matmul(left: Any, right: Any, reason: str) -> Product | None:
    a, b = tensor_of(left), tensor_of(right)
    if a is None or b is None or a.dim() < 1 or b.dim() < 1:
        return None
    position = _position_of_weight(left, right)
    if position == 1:
        return Product(left, right, None, True, _sizes(left, right, True), reason or _unsure(left, right))
    if position == 0:  # the columns of x are the rows of a linear
        rows = math.prod(b.shape[:-2]) * (b.shape[-1] if b.dim() > 1 else 1)
        reason = reason or "written as weight @ x; write x.mT @ weight.mT to have it in the recipe"
        return Product(right, left, None, False, (rows, *a.shape), reason)
    return None


def _position_of_weight(*operands: Any) -> int | None:
    """Which of two operands is the weight: a model's parameter rather than an input that learns, the right rather than the left."""
    weights = [i for i in (1, 0) if is_parameter(operands[i])]
    return max(weights, key=lambda i: _is_module_parameter(without_casts(operands[i])), default=None)


def _unsure(x: Any, weight: Any) -> str:
    """Why x @ weight may be something else than a linear; "" where it is one."""
    if not _is_module_parameter(without_casts(weight)):
        return "its weight is an input that learns, no nn.Parameter; write F.linear to have it in the recipe"
    both = is_parameter(x) and _is_module_parameter(without_casts(x))
    return "a product of two parameters, no linear of an input" if both else ""


def _sizes(x: Any, weight: Any, transposed: bool = False) -> Sizes:
    a, b = tensor_of(x), tensor_of(weight)
    if a is None or b is None or a.dim() < 1 or b.dim() != 2:
        return ()
    rows = a.values().shape[:-1] if a.is_nested else a.shape[:-1]
    return (math.prod(rows), b.shape[1 if transposed else 0], a.shape[-1])


def _einsum(node: fx.Node) -> Product | None:
    equation, *operands = node.args
    if len(operands) == 1 and isinstance(operands[0], (tuple, list)):
        operands = list(operands[0])
    index = _position_of_weight(*operands) if len(operands) == 2 else None
    if index is None or not isinstance(equation, str) or any(tensor_of(o) is None for o in operands):
        return None
    x, weight = operands[1 - index], operands[index]
    inputs, _, output = equation.replace(" ", "").partition("->")
    terms = inputs.split(",")
    transposed = _contracts_last(terms[1 - index], terms[index], output) if len(terms) == 2 else None
    if transposed is not None and fixed(tensor_of(x).shape[-1]) == tensor_of(weight).shape[0 if transposed else 1]:  # type: ignore[union-attr]
        return Product(x, weight, None, transposed, _sizes(x, weight, transposed), _unsure(x, weight))
    reason = f"einsum {equation!r}; write 'btk,kn->btn' or x @ weight to have it in the recipe"
    return Product(x, weight, None, False, _einsum_sizes(terms, operands, weight, output), reason)


def _einsum_sizes(terms: list[str], operands: list[Any], weight: Any, output: str) -> Sizes:
    """(M, N, K) of an einsum, whatever the order of its dimensions."""
    if "." in "".join(terms) or not output:
        return ()
    extent = {
        c: s
        for o, term in zip(operands, terms, strict=True)
        for c, s in zip(term, tensor_of(o).shape, strict=True)  # type: ignore[union-attr]
    }
    held = set(terms[operands.index(weight)])
    n, k = (math.prod(extent[c] for c in held if (c in output) == kept) for kept in (True, False))
    return (math.prod(size for c, size in extent.items() if c not in held), n, k)


def _contracts_last(x: str, weight: str, output: str) -> bool | None:
    """Whether "x,weight->output" is a linear of x's last dimension by a weight [K, N] (True) or [N, K] (False); else None."""
    if len(set(weight)) != 2 or len(weight) != 2 or not x[-1:].isalpha() or x[-1] not in weight:
        return None
    k, rows = x[-1], x[:-1].removeprefix("...")
    n = weight.replace(k, "")
    if len({*rows, k, n}) != len(rows) + 2 or "." in rows or output != x[:-1] + n:
        return None
    return weight[0] == k
