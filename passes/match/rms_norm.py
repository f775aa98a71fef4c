"""RMSNorm written out in a model -> te.rms_norm.

    f = x.to(float32)
    r = rsqrt(mean(f * f, -1, keepdim=True) + eps)
    y = weight * (f * r).to(x.dtype)          Llama, Mistral, Qwen     cast_before_weight
    y = (weight * (f * r)).to(x.dtype)        T5, OLMo
    y = (f * r * (1 + weight)).to(x.dtype)    Gemma                    zero_centered

The walk starts at the reciprocal root, which nothing else in a model looks like. Upwards it reads one formula
and accepts every spelling of its steps; downwards it goes along sole readers as long as the value is still a
norm's: through one cast back and one product with an [N] weight, in either order. What it found is a norm
wherever it stops.
"""

from __future__ import annotations

import dataclasses
import operator
from typing import Any

import torch
from te_dynamo.passes.match.norm import Norm, left_norm, replace_norm
from te_dynamo.passes.match.values import calls, dtype_name, sole_user, tensor_of
from torch import fx

from te_dynamo.report import MatchRecord

__all__ = ["match_written_rms_norm"]

_CASTS = {"to", "type", "type_as", "float", "half", "bfloat16"}
_MUL = ({operator.mul, torch.mul}, {"mul", "__mul__", "__rmul__", "multiply"})
_ADD = ({operator.add, torch.add}, {"add", "__add__", "__radd__"})
_POW = ({operator.pow, torch.pow}, {"pow", "__pow__"})
_MEAN = ({torch.mean}, {"mean"})
_SQUARE = ({torch.square}, {"square"})
_RSQRT = ({torch.rsqrt}, {"rsqrt"})


@dataclasses.dataclass
class _Root:
    """r = rsqrt(mean(f^2, -1, keepdim=True) + eps): `f`, eps, and the nodes from the square to r."""

    f: fx.Node
    eps: Any
    nodes: list[fx.Node]


def match_written_rms_norm(node: fx.Node) -> MatchRecord | None:
    """Replaces the RMSNorm around a reciprocal root where that pays; None when `node` is not the root of
    one."""
    root = _read_root(node)
    product = None if root is None else _product(root)
    if root is None or product is None:
        return None
    f, x = root.f, _before_cast(root.f)
    if tensor_of(f).dtype != torch.float32:
        return left_norm("rms_norm", product, f"it computes in {dtype_name(tensor_of(f).dtype)}, te.rms_norm in fp32")
    for inner in root.nodes:
        if len(inner.users) != 1:
            return left_norm("rms_norm", product, f"its intermediate value {inner} is used elsewhere too")
    chain, weight, cast_first, zero_centered = _walk_down(product, tensor_of(x).dtype)
    if tensor_of(chain[-1]).dtype == torch.float32:
        x, cast_first = f, False  # all in fp32, so there is no cast to come before the weight
    first_to_last = sorted({*root.nodes, *chain, *([f] if f is not x else [])})
    return replace_norm(Norm("rms_norm", x, (weight,), (root.eps, cast_first, zero_centered), tuple(first_to_last)))


def _read_root(node: fx.Node) -> _Root | None:
    """Reads upwards from r; None when r is not the reciprocal root of a mean square."""
    if calls(node, *_RSQRT):
        total = _only(node)
    elif calls(node, *_POW) and _operands(node)[1:] == (-0.5,):
        total = node.args[0]
    else:
        return None
    if not calls(total, *_ADD) or total.kwargs:
        return None
    mean, eps = _ordered(total, lambda operand: calls(operand, *_MEAN))
    if mean is None:
        return None
    square = _mean_of_last(mean)
    f = _squared(square)
    if f is None or tensor_of(f) is None:
        return None
    return _Root(f, eps, [square, mean, total, node])


def _mean_of_last(mean: fx.Node) -> Any:
    """What a mean over the last dimension with keepdim reads, None for another mean."""
    names = ("input", "dim", "keepdim")
    given = {**dict(zip(names, mean.args, strict=False)), **mean.kwargs}
    x = given.get("input")
    dim = given.get("dim")
    dim = dim[0] if isinstance(dim, (tuple, list)) and len(dim) == 1 else dim
    value = tensor_of(x)
    if value is None or set(given) != set(names) or given["keepdim"] is not True:
        return None
    return x if dim in (-1, value.dim() - 1) else None


def _squared(node: Any) -> fx.Node | None:
    """f of f ** 2, f * f or square(f)."""
    if calls(node, *_SQUARE):
        return _only(node)
    if calls(node, *_POW):
        base, *power = _operands(node)
        return base if power in ([2], [2.0]) and isinstance(base, fx.Node) else None
    if calls(node, *_MUL):
        operands = _operands(node)
        return operands[0] if len(operands) == 2 and operands[0] is operands[1] else None
    return None


def _product(root: _Root) -> fx.Node | None:
    """f * r, or x * r with x the tensor f was cast from: the same value, for r is fp32 and promotes it."""
    r = root.nodes[-1]
    for user in r.users:
        if calls(user, *_MUL) and not user.kwargs:
            other = next((o for o in _operands(user) if o is not r), None)
            if other is not None and _before_cast(other) is _before_cast(root.f):
                return user
    return None


def _walk_down(product: fx.Node, dtype: torch.dtype) -> tuple[list[fx.Node], fx.Node | None, bool, bool]:
    """The nodes from f * r to the norm's result, the weight, whether a cast to `dtype` comes before the
    weight, and whether the weight is zero-centered."""
    chain, weight, cast, cast_first, zero_centered = [product], None, dtype == torch.float32, False, False
    done = False
    while not done and (user := sole_user(chain[-1])) is not None:
        done = True
        if (
            _is_cast(user)
            and user.args[0] is chain[-1]
            and tensor_of(user).dtype in (tensor_of(chain[-1]).dtype, dtype)
        ):
            cast, done = cast or tensor_of(user).dtype == dtype, False
            chain.append(user)
        elif weight is None and (found := _weight(user, chain[-1])) is not None:
            (weight, zero_centered), cast_first, done = found, cast, False
            chain.append(user)
    return chain, weight, cast_first, zero_centered


def _weight(node: fx.Node, normed: fx.Node) -> tuple[fx.Node, bool] | None:
    """(weight, zero_centered) of `normed` times an [N] tensor, where that product does not promote the dtype
    back up."""
    if not calls(node, *_MUL) or node.kwargs or tensor_of(node) is None:
        return None
    value, out = tensor_of(normed), tensor_of(node)
    other = next((o for o in _operands(node) if o is not normed), None)
    weight = tensor_of(other)
    if weight is None or tuple(weight.shape) != (value.shape[-1],) or out.dtype != value.dtype:
        return None
    if weight.dtype == torch.float32 and calls(other, *_ADD) and not other.kwargs:
        base, one = _ordered(other, lambda operand: tensor_of(operand) is not None)
        if base is not None and isinstance(one, (int, float)) and one == 1:
            return _before_cast(base), True
    return _before_cast(other) if weight.dtype == torch.float32 else other, False


def _before_cast(node: Any) -> Any:
    """What was cast to fp32, through casts that lose nothing; the node itself when none was."""
    while _is_cast(node) and tensor_of(node).dtype == torch.float32:
        source = tensor_of(node.args[0])
        if source is None or source.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            break
        node = node.args[0]
    return node


def _is_cast(node: Any) -> bool:
    """Whether a node changes its input's dtype and nothing else."""
    if not calls(node, set(), _CASTS):
        return False
    before, after = tensor_of(node.args[0]), tensor_of(node)
    return before is not None and after is not None and before.device == after.device and before.layout == after.layout


def _operands(node: fx.Node) -> tuple[Any, ...]:
    """A call's operands; a power's and a root's may be passed by name."""
    return (
        *node.args,
        *(node.kwargs[name] for name in ("input", "other", "exponent") if name in node.kwargs),
    )


def _only(node: fx.Node) -> Any:
    operands = _operands(node)
    return operands[0] if len(operands) == 1 else None


def _ordered(node: fx.Node, wanted: Any) -> tuple[Any, Any]:
    """A commutative call's two operands, the one that `wanted` accepts first; (None, None) when it accepts
    neither."""
    if len(node.args) != 2:
        return None, None
    a, b = node.args
    return (a, b) if wanted(a) else (b, a) if wanted(b) else (None, None)
