"""Products by letters (letters.py reads them, convolutions.py too): one linear, or one product of groups, between changes of shape.

    torch.einsum("ibh,hnd->ibnd", x, weight)      (x @ weight.reshape(H, N * D)).unflatten(-1, (N, D))
    torch.einsum("bnd,hnd->bh", x, weight)        F.linear(x.flatten(-2), weight.reshape(H, N * D))
    weight @ x                                    F.linear(x.mT, weight).mT
    torch.einsum("egcd,edf->egcf", x, weight)     torch.bmm(x.reshape(E, -1, D), weight).reshape(E, G, C, F)

Such a product is a linear where each dimension of the weight is either summed over with one of x, or kept. It is one of groups where x and
the result share others of the weight.
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

from te_dynamo.passes.torch_ir.match.patterns.linears.strides import readable
from te_dynamo.passes.torch_ir.match.values import emit, emit_method, fixed, tensor_of


@dataclasses.dataclass(frozen=True)
class Factor:
    """A tensor of a product, with a letter for each of its dimensions.

    sizes, steps: of the view that the letters are of, and the (method, arguments) that make it.
    """

    node: fx.Node
    letters: str
    sizes: tuple[Any, ...]
    steps: tuple[tuple[Any, ...], ...] = ()


@dataclasses.dataclass(frozen=True)
class Contraction:
    """y[output] = the sum over the other letters of left[..] * right[..], and the bias.

    spelled: what a reason calls it. bias: for each column of a linear. added: what is added to the result, broadcast to its shape.
    """

    factors: tuple[Factor, Factor]
    output: str
    spelled: str
    bias: fx.Node | None = None
    added: fx.Node | None = None

    @property
    def operands(self) -> tuple[fx.Node, fx.Node]:
        return self.factors[0].node, self.factors[1].node

    def sizes(self, weight: int) -> tuple[Any, ...]:
        """(M, N, K) of the linear whose weight is the operand of that position, M the rows of all groups."""
        extent = dict(zip(*self._letters_and_sizes(), strict=True))
        summed = [c for c in extent if c not in self.output]
        kept = [c for c in self._of(weight)[1] if c in self.output]
        rows = [c for c in extent if c in self.output and c not in kept]
        return tuple(math.prod(extent[c] for c in letters) for letters in (rows, kept, summed))

    def groups(self, weight: int) -> bool:
        """Whether it multiplies groups of rows, each with its own part of the weight."""
        return all(self._of(weight)) and self._is_regular(weight)

    def reason(self, weight: int) -> str:
        """Why it is more than a linear, or groups of them, by that operand; "" where it is one."""
        _, kept, summed = self._of(weight)
        if not self._is_regular(weight) or not kept or not summed:
            return f"{self.spelled}; it is more than x @ weight"
        if any(fixed(size) is None for size in self.factors[weight].sizes):
            return f"its weight has the dynamic shape {list(self.factors[weight].sizes)}; te.linear needs N and K fixed"
        return ""

    def _of(self, weight: int) -> tuple[list[str], list[str], list[str]]:
        """The weight's letters: those of its groups, those of the columns, those that are summed over."""
        ours, other = self.factors[weight].letters, self.factors[1 - weight].letters
        return (
            [c for c in ours if c in other and c in self.output],
            [c for c in ours if c not in other],
            [c for c in ours if c in other and c not in self.output],
        )

    def _is_regular(self, weight: int) -> bool:
        """Whether no letter stands twice in a tensor, none of one tensor alone is summed over, and no size is broadcast."""
        terms = [factor.letters for factor in self.factors]
        groups, _, summed = self._of(weight)
        pairs: dict[str, set[int | None]] = {}
        for c, size in zip(*self._letters_and_sizes(), strict=True):
            pairs.setdefault(c, set()).add(fixed(size))
        alone = {*terms[0]} ^ {*terms[1]}
        return (
            all(len(set(term)) == len(term) for term in (*terms, self.output))
            and alone <= {*self.output}
            and all(len(pairs[c]) == 1 for c in (*groups, *summed))
        )

    def _letters_and_sizes(self) -> tuple[str, tuple[Any, ...]]:
        left, right = self.factors
        return left.letters + right.letters, (*left.sizes, *right.sizes)


def emit_contraction(node: fx.Node, contraction: Contraction, weight: int) -> tuple[fx.Node, fx.Node]:
    """(the product, the user's result) at the graph's insert point: F.linear, x @ weight or torch.bmm between changes of shape."""
    graph = node.graph
    ours, rest = contraction.factors[weight], contraction.factors[1 - weight]
    groups, kept, summed = contraction._of(weight)
    rows = [c for c in rest.letters if c not in ours.letters]
    size = {c: fixed(s) for c, s in zip(ours.letters, ours.sizes, strict=True)}
    g, n, k = (math.prod(size[c] for c in letters) for letters in (groups, kept, summed))  # type: ignore[misc]
    x = _permuted(_viewed(rest, node), rest.letters, [*groups, *rows, *summed], node)
    lead = _sizes_of(x, len(groups) + len(rows), node) if groups else []
    if groups and not len(groups) == len(rows) == len(summed) == 1:
        x = emit_method(graph, "reshape", (x, g, -1, k), node)
    elif len(summed) > 1:
        x = emit_method(graph, "flatten", (x, -len(summed)), node)
    by_rows = [c for c in ours.letters if c not in groups] != [*summed, *kept]  # [N, K]
    inner = [*kept, *summed] if by_rows else [*summed, *kept]
    w = _permuted(_viewed(ours, node), ours.letters, [*groups, *inner], node)
    if len(inner) > 2 or len(groups) > 1:
        w = emit_method(graph, "reshape", (w, *([g] if groups else []), *((n, k) if by_rows else (k, n))), node)
    if groups:
        w = emit_method(graph, "transpose", (w, 1, 2), node) if by_rows else w
        product = y = emit(graph, torch.bmm, (x, w), node)
        if not len(groups) == len(rows) == len(kept) == 1:
            y = emit_method(graph, "reshape", (y, *lead, *(size[c] for c in kept)), node)
    else:
        bias = (contraction.bias,) if contraction.bias is not None else ()
        product = y = emit(graph, F.linear if by_rows else operator.matmul, (x, w, *bias), node)
        if len(kept) > 1:
            y = emit_method(graph, "unflatten", (y, -1, tuple(size[c] for c in kept)), node)
    y = _permuted(y, "".join([*groups, *rows, *kept]), list(contraction.output), node)
    if contraction.added is not None:
        y = emit(graph, operator.add, (y, contraction.added), node)
        if tensor_of(y).dtype != tensor_of(node).dtype:  # autocast
            y = emit_method(graph, "to", (y, tensor_of(node).dtype), node)
    return product, readable(node, y)


def _viewed(factor: Factor, like: fx.Node) -> fx.Node:
    tensor = factor.node
    for method, *arguments in factor.steps:
        tensor = emit_method(like.graph, method, (tensor, *arguments), like)
    return tensor


def _sizes_of(tensor: fx.Node, count: int, like: fx.Node) -> list[Any]:
    """The first sizes, numbers where they are fixed."""
    sizes = map(fixed, tensor_of(tensor).shape[:count])
    return [
        emit_method(like.graph, "size", (tensor, i), like) if size is None else size for i, size in enumerate(sizes)
    ]


def _permuted(tensor: fx.Node, letters: str, order: Sequence[str], like: fx.Node) -> fx.Node:
    if list(letters) == list(order):
        return tensor
    return emit_method(like.graph, "permute", (tensor, *(letters.index(c) for c in order)), like)
