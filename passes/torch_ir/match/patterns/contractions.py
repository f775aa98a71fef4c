"""Products by letters: einsum, tensordot and inner, read as one linear between changes of shape.

    torch.einsum("ibh,hnd->ibnd", x, weight)      (x @ weight.reshape(H, N * D)).unflatten(-1, (N, D))
    torch.einsum("bnd,hnd->bh", x, weight)        F.linear(x.flatten(-2), weight.reshape(H, N * D))
    torch.tensordot(x, weight, ([2], [1]))        F.linear(x, weight)
    torch.inner(x, weight)                        F.linear(x, weight)
    torch.einsum("btd,df,fg->btg", x, w, v)       compounds.py has a row for each step

Such a product is a linear where each dimension of the weight is either summed over with one of x, or kept.
"""

from __future__ import annotations

import dataclasses
import math
import operator
import string
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from te_dynamo.passes.torch_ir.match.values import arguments, calls, emit, emit_method, fixed, tensor_of

__all__ = ["AS_GROUPED", "Contraction", "contraction_of", "einsum_steps", "emit_contraction"]


@dataclasses.dataclass(frozen=True)
class Contraction:
    """y[output] = the sum over the other letters of left[..] * right[..], a letter for each dimension of a tensor.

    spelled: what a reason calls it.
    """

    operands: tuple[fx.Node, fx.Node]
    terms: tuple[str, str]
    output: str
    spelled: str

    def sizes(self, weight: int) -> tuple[Any, ...]:
        """(M, N, K) of the linear whose weight is the operand of that position."""
        extent: dict[str, Any] = {}
        for operand, term in zip(self.operands, self.terms, strict=True):
            extent.update(zip(term, tensor_of(operand).shape, strict=True))
        summed = [c for c in extent if c not in self.output]
        kept = [c for c in self.terms[weight] if c in self.output]
        rows = [c for c in extent if c in self.output and c not in kept]
        return tuple(math.prod(extent[c] for c in letters) for letters in (rows, kept, summed))

    def reason(self, weight: int) -> str:
        """Why it is more than a linear by that operand, "" where it is one."""
        ours, other = self.terms[weight], self.terms[1 - weight]
        letters = [*ours, *other]
        one_of_each = len(set(ours)) == len(ours) and len(set(other)) == len(other)
        twice = [c for c in letters if (c in ours) + (c in other) + (c in self.output) != 2]
        if one_of_each and not twice and any(c in other for c in ours) and any(c in self.output for c in ours):
            return (
                ""
                if all(fixed(size) is not None for size in tensor_of(self.operands[weight]).shape)
                else (
                    f"its weight has the dynamic shape {list(tensor_of(self.operands[weight]).shape)}; te.linear needs N and K fixed"
                )
            )
        batch = [c for c in ours if c in other and c in self.output]
        each_of_its_own = one_of_each and len(ours) == len(other) == len(self.output) == 3 and len(batch) == 1
        return f"{self.spelled}; {AS_GROUPED if each_of_its_own else 'it is more than x @ weight'}"


AS_GROUPED = "as torch.bmm of 3-D operands it is a grouped GEMM"


def contraction_of(node: fx.Node) -> Contraction | None:
    """The contraction of two tensors that a node is; None for any other node."""
    if calls(node, {torch.einsum}):
        return _einsum(node)
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


def emit_contraction(node: fx.Node, contraction: Contraction, weight: int) -> tuple[fx.Node, fx.Node]:
    """(the linear, the user's result) at the graph's insert point, as F.linear or x @ weight between changes of shape."""
    graph = node.graph
    (x, w), (rest, ours) = contraction.operands, contraction.terms
    if weight == 0:
        x, w, rest, ours = w, x, ours, rest
    summed, kept = [c for c in ours if c in rest], [c for c in ours if c not in rest]
    rows = [c for c in rest if c not in summed]
    x = _permuted(x, rest, [*rows, *summed], node)
    if len(summed) > 1:
        x = emit_method(graph, "flatten", (x, -len(summed)), node)
    size = dict(zip(ours, map(fixed, tensor_of(w).shape), strict=True))
    n, k = (math.prod(size[c] for c in letters) for letters in (kept, summed))  # type: ignore[misc]
    by_rows = list(ours) != [*summed, *kept]  # [N, K]
    w = _permuted(w, ours, [*kept, *summed] if by_rows else [*summed, *kept], node)
    if len(ours) > 2:
        w = emit_method(graph, "reshape", (w, *((n, k) if by_rows else (k, n))), node)
    linear = y = emit(graph, F.linear if by_rows else operator.matmul, (x, w), node)
    if len(kept) > 1:
        y = emit_method(graph, "unflatten", (y, -1, tuple(size[c] for c in kept)), node)
    return linear, _permuted(y, "".join([*rows, *kept]), list(contraction.output), node)


def _permuted(tensor: fx.Node, letters: str, order: list[str], like: fx.Node) -> fx.Node:
    if list(letters) == order:
        return tensor
    return emit_method(like.graph, "permute", (tensor, *(letters.index(c) for c in order)), like)


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


def _einsum(node: fx.Node) -> Contraction | None:
    found = _letters(node)
    if found is None or len(found[0]) != 2:
        return None
    operands, terms, output, equation = found
    return Contraction(tuple(operands), tuple(terms), output, f"einsum {equation!r}")  # type: ignore[arg-type]


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
    return Contraction((a, b), ("".join(left), "".join(right)), "".join(output), spelled)
