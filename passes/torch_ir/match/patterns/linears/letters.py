"""The calls that multiply two tensors, with a letter for each dimension: einsum, tensordot, inner, matmul, addmm, baddbmm.

torch.einsum("btd,dn->btn", x, weight)      as it says
torch.tensordot(x, weight, ([2], [1]))      "abc,Bc->abB"
x @ weight[:, None]                         "ebcd,edf->ebcf": a dimension of size one that is broadcast has no letter
torch.baddbmm(bias, x, weight)              "eab,ebc->eac", and the bias
torch.einsum("btd,df,fg->btg", x, w, v)     `einsum_steps` and `emit_steps`, for compounds.py
"""

from __future__ import annotations

import math
import operator
import string
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from te_dynamo.passes.torch_ir.match.patterns.linears.contractions import Contraction, Factor
from te_dynamo.passes.torch_ir.match.values import arguments, calls, emit, fixed, name_of, spells, tensor_of

_aten = torch.ops.aten

MATMUL = {
    torch.matmul, torch.linalg.matmul, torch.mm, torch.bmm, torch.mv, operator.matmul,
    _aten.matmul, _aten.matmul.default, _aten.mm, _aten.mm.default, _aten.bmm, _aten.bmm.default,
}  # fmt: skip
MATMUL_METHODS = {"matmul", "mm", "bmm", "mv", "__matmul__"}
_SECOND = {"mm": "mat2", "bmm": "mat2", "mv": "vec"}


def factors_of(node: fx.Node) -> dict[str, Any]:
    """The arguments of one of MATMUL by the names "input", "other" and "out"."""
    second = _SECOND.get(name_of(node), "other")
    given = arguments(node, "input", second, "out") or {}
    return {"other" if name == second else name: value for name, value in given.items()}


def contraction_of(node: fx.Node) -> Contraction | None:
    """The contraction of two tensors that a node is; None for any other node, and for a product with a vector."""
    if calls(node, {torch.einsum}):
        return _einsum(node)
    if spells(node, MATMUL, MATMUL_METHODS):
        given = factors_of(node)
        return _matmul(given.get("input"), given.get("other")) if given.get("out") is None else None
    for name, factor in (("baddbmm", "batch"), ("addmm", "mat")):
        if calls(node, {getattr(torch, name)}, {name}):
            given = arguments(node, "input", f"{factor}1", f"{factor}2", "beta", "alpha") or {}
            if any(given.get(scale, 1) != 1 for scale in ("beta", "alpha")) or not isinstance(
                given.get("input"), fx.Node
            ):
                return None
            return _matmul(given.get(f"{factor}1"), given.get(f"{factor}2"), given["input"])
    if calls(node, {_aten.tensordot.default}) and len(node.args) == 4:  # torch.export's, with the dimensions of each
        a, b, *dims = node.args
        return _by_dims(a, b, dims, "torch.tensordot")  # type: ignore[arg-type]
    if not calls(node, {torch.tensordot, torch.inner}, {"inner"}):
        return None
    names = ("a", "b", "dims", "out") if node.target is torch.tensordot else ("input", "other", "out")
    given = arguments(node, *names) or {}
    a, b = (given.get(name) for name in names[:2])
    if not isinstance(a, fx.Node) or not isinstance(b, fx.Node) or given.get("out") is not None:
        return None
    if node.target is torch.tensordot:
        return _by_dims(a, b, given.get("dims", 2), "torch.tensordot")
    return _by_dims(a, b, ([-1], [-1]), "torch.inner")


def _matmul(a: Any, b: Any, added: fx.Node | None = None) -> Contraction | None:
    left, right = tensor_of(a), tensor_of(b)
    if left is None or right is None or left.dim() < 2 or right.dim() < 2:
        return None
    count = max(left.dim(), right.dim()) - 2
    batch = string.ascii_lowercase[:count]
    have = [(batch + "NK")[-left.dim() :], (batch + "KM")[-right.dim() :]]
    sizes = [dict(zip(have[i], value.shape, strict=True)) for i, value in enumerate((left, right))]
    factors = []
    for i, node in enumerate((a, b)):
        own, other = sizes[i], sizes[1 - i]
        spread = [c for c in batch if fixed(own.get(c, 0)) == 1 and c in other and (i == 1 or fixed(other[c]) != 1)]
        steps = (("squeeze", tuple(map(have[i].index, spread))),) if spread else ()
        kept = "".join(c for c in have[i] if c not in spread)
        factors.append(Factor(node, kept, tuple(own[c] for c in kept), steps))
    return Contraction((factors[0], factors[1]), batch + "NM", "a product by matmul", added=added)


def _contraction(operands: Sequence[fx.Node], terms: Sequence[str], output: str, spelled: str) -> Contraction:
    left, right = (Factor(o, term, tuple(tensor_of(o).shape)) for o, term in zip(operands, terms, strict=True))
    return Contraction((left, right), output, spelled)


def einsum_steps(node: fx.Node) -> list[list[tuple[fx.Node, tuple[Any, ...]]]]:
    """Of an einsum of more than two operands, multiplied from the left: (operand, (M, N, K) if that is the weight) of each that a step adds."""
    found = _letters(node) if calls(node, {torch.einsum}) else None
    if found is None or len(found[0]) < 3:
        return []
    operands, terms, output, _ = found
    extent: dict[str, Any] = {}
    for operand, term in zip(operands, terms, strict=True):
        extent.update(zip(term, tensor_of(operand).shape, strict=True))
    steps, left = [], terms[0]
    for i in range(1, len(terms)):
        letters = {*left, *terms[i]}
        kept = {*output, *"".join(terms[i + 1 :])} & letters
        added = []
        for operand, other in [(operands[i], left), *([(operands[0], terms[1])] if i == 1 else [])]:
            columns = kept - {*other}
            sizes = tuple(math.prod(extent[c] for c in of) for of in (kept - columns, columns, letters - kept))
            added.append((operand, sizes))
        steps.append(added)
        left = "".join(sorted(kept))
    return steps


def emit_steps(node: fx.Node) -> list[fx.Node]:
    """The same as einsums of two tensors, at the graph's insert point; the last is the user's result."""
    operands, terms, output, _ = _letters(node) or ([], [], "", "")
    steps, value, left = [], operands[0], terms[0]
    for i in range(1, len(terms)):
        after = {*output, *"".join(terms[i + 1 :])}
        kept = output if i == len(terms) - 1 else "".join(c for c in dict.fromkeys(left + terms[i]) if c in after)
        value = emit(node.graph, torch.einsum, (f"{left},{terms[i]}->{kept}", value, operands[i]), node)
        steps.append(value)
        left = kept
    return steps


def _einsum(node: fx.Node) -> Contraction | None:
    found = _letters(node)
    if found is None or len(found[0]) != 2:
        return None
    operands, terms, output, equation = found
    return _contraction(operands, terms, output, f"einsum {equation!r}")


def _letters(node: fx.Node) -> tuple[list[Any], list[str], str, str] | None:
    """(operands, a letter for each of their dimensions, those of the result, the equation); None where the graph does not say."""
    operands: list[Any]
    equation, *operands = node.args
    if not isinstance(equation, str):
        equation, operands = _of_sublists(node.args)
    elif len(operands) == 1 and isinstance(operands[0], (tuple, list)):
        operands = list(operands[0])
    if any(tensor_of(operand) is None for operand in operands):
        return None
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    terms = inputs.split(",")
    unused = "".join(c for c in string.ascii_letters if c not in equation)
    spans = [tensor_of(o).dim() - len(term) + 3 for o, term in zip(operands, terms, strict=True) if "..." in term]
    span = max(spans, default=0)
    written = [
        term.replace("...", unused[span - tensor_of(o).dim() + len(term) - 3 : span])
        for o, term in zip(operands, terms, strict=True)
    ]
    if arrow:
        output = output.replace("...", unused[:span])
    else:
        once = sorted(c for c in set(inputs) - set(".,") if inputs.count(c) == 1)
        output = unused[:span] + "".join(once)
    return operands, written, output, equation


def _of_sublists(args: Sequence[Any]) -> tuple[str, list[Any]]:
    """(the equation, the operands) of einsum(x, [0, 1], weight, [1, 2], [0, 2]); the last list may be missing."""
    numbers = string.ascii_uppercase + string.ascii_lowercase  # in the order that an output has that is not given
    terms = ["".join("..." if i is ... else numbers[i] for i in given) for given in args[1::2]]
    output = ["->" + "".join("..." if i is ... else numbers[i] for i in args[-1])] if len(args) % 2 else []
    return ",".join(terms) + "".join(output), list(args[: len(args) // 2 * 2 : 2])


def _by_dims(a: fx.Node, b: fx.Node, dims: Any, spelled: str) -> Contraction | None:
    """The contraction of these dimensions, as torch.tensordot takes them; None for a number and for dimensions in a tensor."""
    if tensor_of(a) is None or tensor_of(b) is None:
        return None
    ranks = tensor_of(a).dim(), tensor_of(b).dim()
    if isinstance(dims, int):
        dims = (range(ranks[0] - dims, ranks[0]), range(dims))
    if not isinstance(dims, (tuple, list)) or len(dims) != 2 or not all(ranks):
        return None
    left, right = (
        [string.ascii_lowercase[i] for i in range(ranks[0])],
        [string.ascii_uppercase[i] for i in range(ranks[1])],
    )
    for i, j in zip(*(([d] if isinstance(d, int) else d) for d in dims), strict=True):
        right[j] = left[i]
    output = [c for c in (*left, *right) if (c in left) != (c in right)]
    return _contraction((a, b), ("".join(left), "".join(right)), "".join(output), spelled)
