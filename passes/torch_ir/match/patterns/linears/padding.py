"""Linears and experts whose N or K is no multiple of what the GEMMs take: GPT-2's head of 50257 columns, Mixer's 196 patches, DLRM's 479 features.

    before    y = F.linear(x, weight, bias)                                             weight [N, K], bias [N]
    after     p = torch.cat([weight, weight.new_zeros(P, K)]);  b = torch.cat([bias, bias.new_zeros(P)])
              y = te.linear(x, p, b, config)[0][..., :N]

N + P is the next multiple. Of K it is the same with x and the weight, whose zeros add nothing to the sums. y is a view of rows that are longer, and contiguous where a reader needs that. Rows of zeros change no amax. It is
torch.cat rather than F.pad, for the gradient of weight is then a view of the gradient of p.
"""

from __future__ import annotations

import operator

import torch
import torch.nn.functional as F
from torch import fx

from te_dynamo.passes.torch_ir.match.patterns.linears.strides import readable
from te_dynamo.passes.torch_ir.match.values import emit, emit_method, tensor_of
from te_dynamo.recipe import Recipe

MOST_WASTE = 1 / 16
"""Of the product. A router of 8 columns would be half zeros; it is better off in the user's precision."""


def padding(n: int, alignment: int) -> int:
    """P, what is missing of N or K; 0 where they would waste more than MOST_WASTE."""
    missing = -n % alignment
    return missing if missing <= n * MOST_WASTE else 0


def alignment_reason(n: int, k: int, recipe: Recipe) -> str:
    """Why a linear of such a weight is in no recipe, "" where N and K are multiples or are padded to them."""
    for name, size in (("N", n), ("K", k)):
        if not size:
            return f"N = {n}, K = {k}: its weight is empty"
        if (size + padding(size, recipe.alignment)) % recipe.alignment:
            missing = -size % recipe.alignment
            return (
                f"N = {n}, K = {k}: {recipe.gemms} need N and K to be multiples of {recipe.alignment}; padding {name} to {size + missing} "
                f"would add {missing / size:.0%}, more than 1/16"
            )
    return ""


def padded(tensor: fx.Node, missing: int, dim: int, like: fx.Node) -> fx.Node:
    """The tensor with so many zeros behind it along `dim`, at the graph's insert point."""
    shape = list(tensor_of(tensor).shape)
    shape[dim] = missing
    zeros = emit_method(like.graph, "new_zeros", (tensor, tuple(shape)), like)
    return emit(like.graph, torch.cat, ((tensor, zeros), dim), like)


def padded_rows(x: fx.Node, missing: int, like: fx.Node) -> fx.Node:
    """x [.., K] with so many zeros behind each row, at the graph's insert point."""
    return emit(like.graph, F.pad, (x, (0, missing)), like)


def columns_of(whole: fx.Node, node: fx.Node) -> fx.Node:
    """whole[..., :n], to stand in the place of `node`, whose rows have n columns; `whole` where it has no more."""
    n = tensor_of(node).shape[-1]
    if tensor_of(whole).shape[-1] == n:
        return whole
    part = emit(node.graph, operator.getitem, (whole, (Ellipsis, slice(None, n))), node)
    return readable(node, part)
