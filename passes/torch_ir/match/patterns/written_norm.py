"""RMSNorm and LayerNorm written out in a model -> te.rms_norm, te.layer_norm.

    f = x.to(float32)
    r = rsqrt(mean(f * f, -1, keepdim=True) + eps)
    y = weight * (f * r).to(x.dtype)          Llama, Mistral, Qwen     cast_before_weight
    y = (weight * (f * r)).to(x.dtype)        T5, OLMo
    y = (f * r * (1 + weight)).to(x.dtype)    Gemma                    zero_centered

LayerNorm is the same of f = g - mean(g), g = x.to(float32), with a bias perhaps (Cohere has a weight alone).

The walk starts at the reciprocal root, which nothing else in a model looks like. Upwards it reads one formula
and accepts every spelling of its steps; downwards it goes along sole readers as long as the value is still a
norm's: through one cast back and one product with an [N] weight, in either order, and LayerNorm's sum with an [N] bias. What it
found is a norm wherever it stops.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from te_dynamo.inspect.report import MatchRecord
from te_dynamo.passes.torch_ir.match.patterns.formulas import ADD, MUL, POW, SQUARE
from te_dynamo.passes.torch_ir.match.patterns.norm import Norm, before_casts, is_cast, left_norm, replace_norm
from te_dynamo.passes.torch_ir.match.values import calls, dtype_name, sole_user, tensor_of

__all__ = ["match_written_norm", "written_norm"]

_SUB = ({operator.sub, torch.sub}, {"sub", "__sub__"})
_MEAN = ({torch.mean}, {"mean"})
_RSQRT = ({torch.rsqrt}, {"rsqrt"})


@dataclasses.dataclass
class _Root:
    """r = rsqrt(mean(f^2, -1, keepdim=True) + eps): `f`, eps, the nodes from the square to r, and the product of f and r.

    centering: of LayerNorm, with `f` what the mean is taken from: the mean and the differences.
    """

    f: fx.Node
    eps: Any
    nodes: list[fx.Node]
    product: fx.Node
    centering: tuple[fx.Node, ...] = ()

    @property
    def kind(self) -> str:
        return "layer_norm" if self.centering else "rms_norm"


@dataclasses.dataclass
class _Scaling:
    """The way from f * r to the norm's result: its nodes, weight and bias, and where and how the weight comes in."""

    nodes: list[fx.Node]
    layer: bool
    weight: fx.Node | None = None
    bias: fx.Node | None = None
    cast_before_weight: bool = False
    zero_centered: bool = False


def match_written_norm(node: fx.Node) -> MatchRecord | None:
    """Replaces the norm around a reciprocal root where that pays; None when `node` is no such root."""
    norm = written_norm(node)
    return replace_norm(norm) if isinstance(norm, Norm) else norm


def written_norm(node: fx.Node) -> Norm | MatchRecord | None:
    """The norm around a reciprocal root, or the record of why it is none that te has; None when `node` is no such root."""
    root = _read_root(node)
    if root is None:
        return None
    root = _centered(root) or root
    f, (x, casts) = root.f, before_casts(root.f)
    if tensor_of(f).dtype != torch.float32:
        reason = f"it computes in {dtype_name(tensor_of(f).dtype)}, te.{root.kind} in fp32"
        return left_norm(root.kind, root.product, reason)
    for inner in root.nodes:
        if len(inner.users) != 1:
            return left_norm(root.kind, root.product, f"its intermediate value {inner} is used elsewhere too")
    multiplicand = next(o for o in _operands(root.product) if o is not node)
    scaling = _scaling(root, tensor_of(x).dtype)
    result = tensor_of(scaling.nodes[-1]).dtype
    if result == torch.float32:  # no rounding anywhere
        scaling.cast_before_weight = False
    if result != tensor_of(x).dtype:  # the model goes on in fp32: its norm starts behind the cast
        x, casts = f, []
    nodes = {*root.nodes, *root.centering, *scaling.nodes, *casts, *before_casts(multiplicand)[1]} - {x}
    in_order = tuple(sorted(nodes))
    if not scaling.layer:
        options = (root.eps, scaling.cast_before_weight, scaling.zero_centered)
        return Norm("rms_norm", x, (scaling.weight,), options, in_order)
    if scaling.cast_before_weight:
        reason = f"it rounds to {dtype_name(result)} before its weight or bias too, te.layer_norm only at the end"
        return left_norm("layer_norm", in_order[-1], reason)
    return Norm("layer_norm", x, (scaling.weight, scaling.bias), (root.eps,), in_order)


def _read_root(node: fx.Node) -> _Root | None:
    """Reads upwards from r; None when r is not the reciprocal root of a mean square, multiplied with what was squared."""
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
    product = _product(node, lambda other: before_casts(other)[0] is before_casts(f)[0] or _differences(f, other))
    return None if product is None else _Root(f, eps, [square, mean, total, node], product)


def _centered(root: _Root) -> _Root | None:
    """The same root as LayerNorm's: f is g - mean(g), and nothing but the norm reads these."""
    if not _differences(root.f, root.f):
        return None
    g, mean = root.f.args
    assert isinstance(g, fx.Node) and isinstance(mean, fx.Node)
    differences = tuple(user for user in mean.users if _differences(root.f, user))
    readers = {user for difference in differences for user in difference.users}
    if len(differences) != len(mean.users) or readers != {root.nodes[0], root.product}:
        return None
    return dataclasses.replace(root, f=g, centering=(mean, *differences))


def _differences(a: fx.Node, b: Any) -> bool:
    """Whether a and b are both g - mean(g), of the same g."""
    if not all(calls(node, *_SUB) and not node.kwargs and len(node.args) == 2 for node in (a, b)):
        return False
    g, mean = a.args
    return calls(mean, *_MEAN) and g is _mean_of_last(mean) and b.args == (g, mean)  # type: ignore[arg-type]


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


def _product(r: fx.Node, is_f: Callable[[Any], bool]) -> fx.Node | None:
    """f * r, or x * r with x the tensor f was cast from: the same value, for r is fp32 and promotes it."""
    for user in r.users:
        if calls(user, *MUL) and not user.kwargs:
            other: Any = next((o for o in _operands(user) if o is not r), None)
            if other is not None and is_f(other):
                return user
    return None


def _scaling(root: _Root, dtype: torch.dtype) -> _Scaling:
    """Reads downwards from f * r, for an x of `dtype`."""
    found = _Scaling([root.product], layer=bool(root.centering))
    cast, current = dtype == torch.float32, root.product
    while (user := sole_user(current)) is not None:
        if is_cast(user) and user.args[0] is current and tensor_of(user).dtype in (tensor_of(current).dtype, dtype):
            cast = cast or tensor_of(user).dtype == dtype
        elif _read_weight(user, current, found) or _read_bias(user, current, found):
            found.cast_before_weight = cast
        else:
            break
        found.nodes.append(user)
        current = user
    return found


def _read_weight(node: fx.Node, normed: fx.Node, found: _Scaling) -> bool:
    """Whether `node` is `normed` times an [N] tensor, without promoting it; adds what it found to `found`."""
    other = _of_columns(node, normed) if calls(node, *MUL) and found.weight is found.bias is None else None
    if other is None:
        return False
    inner: list[fx.Node] = []
    if tensor_of(other).dtype == torch.float32:  # what is cast up, or raised by one in fp32, te.rms_norm does itself
        if calls(other, *ADD) and not other.kwargs and not found.layer:
            base, one = _ordered(other, lambda operand: tensor_of(operand) is not None)
            if isinstance(one, (int, float)) and one == 1:
                inner, other, found.zero_centered = [other], base, True
        other, casts = before_casts(other)
        inner += casts
    found.weight = other
    found.nodes = inner + found.nodes
    return True


def _read_bias(node: fx.Node, normed: fx.Node, found: _Scaling) -> bool:
    """Whether `node` is a LayerNorm's `normed` plus an [N] tensor, without promoting it; adds what it found to `found`."""
    other = _of_columns(node, normed) if calls(node, *ADD) and found.layer and found.bias is None else None
    if other is None:
        return False
    found.bias, casts = before_casts(other)
    found.nodes = casts + found.nodes
    return True


def _of_columns(node: fx.Node, normed: fx.Node) -> Any:
    """The operand of `node` beside `normed`, where it is an [N] tensor and does not promote it; None of any other node."""
    other: Any = next((o for o in _operands(node) if o is not normed), None)
    result, value, operand = tensor_of(node), tensor_of(normed), tensor_of(other)
    if node.kwargs or result is None or operand is None or result.dtype != value.dtype:
        return None
    return other if tuple(operand.shape) == (value.shape[-1],) else None


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
