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
from typing import Any

import torch
from torch import fx

from te_dynamo.inspect.report import MatchRecord
from te_dynamo.passes.torch_ir.match.patterns.formulas import ADD, MUL, POW, SQUARE
from te_dynamo.passes.torch_ir.match.patterns.norm import Norm, left_norm, replace_norm
from te_dynamo.passes.torch_ir.match.values import FLOATS, calls, dtype_name, sole_user, tensor_of

__all__ = ["match_written_rms_norm", "written_rms_norm"]

_CASTS = {"to", "type", "type_as", "float", "half", "bfloat16"}
_MEAN = ({torch.mean}, {"mean"})
_RSQRT = ({torch.rsqrt}, {"rsqrt"})


@dataclasses.dataclass
class _Root:
    """r = rsqrt(mean(f^2, -1, keepdim=True) + eps): `f`, eps, and the nodes from the square to r."""

    f: fx.Node
    eps: Any
    nodes: list[fx.Node]


@dataclasses.dataclass
class _Scaling:
    """The way from f * r to the norm's result: its nodes, the weight, and where and how that comes in."""

    nodes: list[fx.Node]
    weight: fx.Node | None = None
    cast_before_weight: bool = False
    zero_centered: bool = False


def match_written_rms_norm(node: fx.Node) -> MatchRecord | None:
    """Replaces the RMSNorm around a reciprocal root where that pays; None when `node` is no such root."""
    norm = written_rms_norm(node)
    return replace_norm(norm) if isinstance(norm, Norm) else norm


def written_rms_norm(node: fx.Node) -> Norm | MatchRecord | None:
    """The RMSNorm around a reciprocal root, or the record of why it is none that te has; None when `node` is no such root."""
    root = _read_root(node)
    product = None if root is None else _product(root)
    if root is None or product is None:
        return None
    f, (x, casts) = root.f, _before_casts(root.f)
    if tensor_of(f).dtype != torch.float32:
        reason = f"it computes in {dtype_name(tensor_of(f).dtype)}, te.rms_norm in fp32"
        return left_norm("rms_norm", product, reason)
    for inner in root.nodes:
        if len(inner.users) != 1:
            return left_norm("rms_norm", product, f"its intermediate value {inner} is used elsewhere too")
    multiplicand = next(o for o in _operands(product) if o is not node)
    scaling = _scaling(product, tensor_of(x).dtype)
    result = tensor_of(scaling.nodes[-1]).dtype
    if result == torch.float32:  # no rounding anywhere
        scaling.cast_before_weight = False
    if result != tensor_of(x).dtype:  # the model goes on in fp32: its norm starts behind the cast
        x, casts = f, []
    nodes = {*root.nodes, *scaling.nodes, *casts, *_before_casts(multiplicand)[1]} - {x}
    options = (root.eps, scaling.cast_before_weight, scaling.zero_centered)
    return Norm("rms_norm", x, (scaling.weight,), options, tuple(sorted(nodes)))


def _read_root(node: fx.Node) -> _Root | None:
    """Reads upwards from r; None when r is not the reciprocal root of a mean square."""
    if calls(node, *_RSQRT):
        total = _only(node)
    elif calls(node, *POW) and _operands(node)[1:] == (-0.5,):
        total = node.args[0]
    else:
        return None
    if not calls(total, *ADD) or total.kwargs:
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
    if calls(node, *SQUARE):
        return _only(node)
    if calls(node, *POW):
        base, *power = _operands(node)
        return base if power in ([2], [2.0]) and isinstance(base, fx.Node) else None
    if calls(node, *MUL):
        operands = _operands(node)
        return operands[0] if len(operands) == 2 and operands[0] is operands[1] else None
    return None


def _product(root: _Root) -> fx.Node | None:
    """f * r, or x * r with x the tensor f was cast from: the same value, for r is fp32 and promotes it."""
    r = root.nodes[-1]
    for user in r.users:
        if calls(user, *MUL) and not user.kwargs:
            other: Any = next((o for o in _operands(user) if o is not r), None)
            if other is not None and _before_casts(other)[0] is _before_casts(root.f)[0]:
                return user
    return None


def _scaling(product: fx.Node, dtype: torch.dtype) -> _Scaling:
    """Reads downwards from f * r, for an x of `dtype`."""
    found = _Scaling([product])
    cast, current = dtype == torch.float32, product
    while (user := sole_user(current)) is not None:
        if _is_cast(user) and user.args[0] is current and tensor_of(user).dtype in (tensor_of(current).dtype, dtype):
            cast = cast or tensor_of(user).dtype == dtype
        elif found.weight is None and _read_weight(user, current, found):
            found.cast_before_weight = cast
        else:
            break
        found.nodes.append(user)
        current = user
    return found


def _read_weight(node: fx.Node, normed: fx.Node, found: _Scaling) -> bool:
    """Whether `node` is `normed` times an [N] tensor, without promoting it; adds what it found to `found`."""
    if not calls(node, *MUL) or node.kwargs or tensor_of(node) is None:
        return False
    value = tensor_of(normed)
    other: Any = next((o for o in _operands(node) if o is not normed), None)
    weight = tensor_of(other)
    if weight is None or tuple(weight.shape) != (value.shape[-1],) or tensor_of(node).dtype != value.dtype:
        return False
    inner: list[fx.Node] = []
    if weight.dtype == torch.float32:  # what is cast up, or raised by one in fp32, te.rms_norm does itself
        if calls(other, *ADD) and not other.kwargs:
            base, one = _ordered(other, lambda operand: tensor_of(operand) is not None)
            if isinstance(one, (int, float)) and one == 1:
                inner, other, found.zero_centered = [other], base, True
        other, casts = _before_casts(other)
        inner += casts
    found.weight = other
    found.nodes = inner + found.nodes
    return True


def _before_casts(node: Any) -> tuple[Any, list[fx.Node]]:
    """(what was cast to fp32, the casts): through casts that lose nothing; the node itself when none was."""
    casts = []
    while _is_cast(node) and tensor_of(node).dtype == torch.float32 and tensor_of(node.args[0]).dtype in FLOATS:
        casts.append(node)
        node = node.args[0]
    return node, casts


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
