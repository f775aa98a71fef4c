"""RMSNorm and LayerNorm written out in a model -> te.rms_norm, te.layer_norm.

    f = x.to(float32)
    r = rsqrt(mean(f * f, -1, keepdim=True) + eps)
    y = weight * (f * r).to(x.dtype)          Llama, Mistral, Qwen     cast_before_weight
    y = (weight * (f * r)).to(x.dtype)        T5, OLMo
    y = (f * r * (1 + weight)).to(x.dtype)    Gemma                    zero_centered

LayerNorm is the same of f = g - mean(g), g = x.to(float32), with a bias perhaps (Cohere has a weight alone). Its mean square may be var(g).

The quotient f / sqrt(..) is the same product, and the weight may be multiplied before it. So is the row on the sphere, in x-transformers:

    y = normalize(f, dim=-1) * sqrt(N) * weight

The walk starts at the root, or at what is on the sphere. Upwards it reads one formula
and accepts every spelling of its steps; downwards it goes along sole readers as long as the value is still a
norm's: through one cast back and one product with an [N] weight, in either order, and LayerNorm's sum with an [N] bias. What it
found is a norm wherever it stops.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from te_dynamo.passes.torch_ir.match.patterns.formulas import ADD, DIV, MUL, POW, SQUARE
from te_dynamo.passes.torch_ir.match.patterns.norm import Norm, before_casts, is_cast, replace_norm
from te_dynamo.passes.torch_ir.match.values import arguments, calls, dtype_name, fixed, sole_user, tensor_of
from te_dynamo.passes.torch_ir.match.where import record
from te_dynamo.report import MatchRecord

_SUB = ({operator.sub, torch.sub}, {"sub", "__sub__"})
_MEAN = ({torch.mean}, {"mean"})
_VARIANCE = ({torch.var}, {"var"})
_DEVIATION = ({torch.std}, {"std"})
_RSQRT = ({torch.rsqrt}, {"rsqrt"})
_SQRT = ({torch.sqrt}, {"sqrt"})
_RECIPROCAL = ({torch.reciprocal}, {"reciprocal"})


@dataclasses.dataclass
class _Root:
    """r = rsqrt(mean(f^2, -1, keepdim=True) + eps): `f`, eps, the nodes from the square to r, and the product of f and r.

    normed: f, as the product has it: perhaps before its cast. weighted: its product with the weight, where that comes first.
    centering: of LayerNorm, with `f` what the mean is taken from: the mean and the differences.
    """

    f: fx.Node
    eps: Any
    nodes: list[fx.Node]
    product: fx.Node
    normed: fx.Node
    weighted: fx.Node | None = None
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
    """Replaces the norm around a root where that pays; None when `node` is no such root."""
    norm = written_norm(node)
    return replace_norm(norm) if isinstance(norm, Norm) else norm


def written_norm(node: fx.Node) -> Norm | MatchRecord | None:
    """The norm around a root, or the record of why it is none that te has; None when `node` is no such root."""
    root = _on_the_sphere(node) or _read_root(node)
    if root is None:
        return _by_deviation(node)
    if (centered := _centered(root)) is None and calls(root.nodes[0], *_VARIANCE):
        return record("layer_norm", root.product, "its mean or what it subtracts it from is read elsewhere too")
    root = centered or root
    f, (x, casts) = root.f, before_casts(root.f)
    if tensor_of(f).dtype != torch.float32:
        reason = f"it computes in {dtype_name(tensor_of(f).dtype)}, te.{root.kind} in fp32"
        return record(root.kind, root.product, reason)
    for inner in root.nodes:
        if len(inner.users) != 1:
            return record(root.kind, root.product, f"its intermediate value {inner} is used elsewhere too")
    scaling = _scaling(root, tensor_of(x).dtype)
    result = tensor_of(scaling.nodes[-1]).dtype
    if result == torch.float32:  # no rounding anywhere
        scaling.cast_before_weight = False
    if result != tensor_of(x).dtype:  # the model goes on in fp32: its norm starts behind the cast
        x, casts = f, []
    nodes = {*root.nodes, *root.centering, *scaling.nodes, *casts, *before_casts(root.normed)[1]} - {x}
    in_order = tuple(sorted(nodes))
    if not scaling.layer:
        options = (root.eps, scaling.cast_before_weight, scaling.zero_centered)
        return Norm("rms_norm", x, (scaling.weight,), options, in_order)
    if scaling.cast_before_weight:
        reason = f"it rounds to {dtype_name(result)} before its weight or bias too, te.layer_norm only at the end"
        return record("layer_norm", in_order[-1], reason)
    return Norm("layer_norm", x, (scaling.weight, scaling.bias), (root.eps,), in_order)


def _read_root(node: fx.Node) -> _Root | None:
    """Reads upwards from r; None when r is not the reciprocal root of a mean square, multiplied with what was squared."""
    power = _operands(node)[1:] if calls(node, *POW) else ()
    inverse = calls(node, *_RSQRT) or power == (-0.5,)
    if not inverse and not calls(node, *_SQRT) and power != (0.5,):
        return None
    total = _operands(node)[0]
    if not calls(total, *ADD) or total.kwargs:
        return None
    mean, eps = _ordered(total, lambda operand: calls(operand, *_MEAN) or calls(operand, *_VARIANCE))
    square = None if mean is None else _variance_of_last(mean) if calls(mean, *_VARIANCE) else _mean_of_last(mean)
    if square is None:
        return None
    if calls(mean, *_VARIANCE):
        f, nodes = square, [mean, total]
    else:
        f, nodes = _squared(square), [square, mean, total]
    if f is None or tensor_of(f) is None:
        return None
    reader: Any = sole_user(node)
    if not inverse and (calls(reader, *_RECIPROCAL) or (calls(reader, *DIV) and _operands(reader) == (1, node))):
        nodes, node, inverse = [*nodes, node], reader, True

    def is_f(other: Any) -> bool:
        if calls(mean, *_VARIANCE):
            return _differences(other, other) and before_casts(other.args[0])[0] is before_casts(f)[0]
        return before_casts(other)[0] is before_casts(f)[0] or _differences(f, other)

    found = _product(node, is_f, inverse)
    return None if found is None else _Root(f, eps, [*nodes, node], *found)


def _on_the_sphere(node: fx.Node) -> _Root | None:
    """sqrt(N) * f / |f|, whose |f| is at least an eps; None of any other node.

    te.rms_norm adds the eps, and so differs where |f| is about as small: no row is as short as 1e-12, and zeros stay zeros.
    """
    given = arguments(node, "input", "p", "dim", "eps") if calls(node, {F.normalize}) else None
    f: Any = (given or {}).get("input")
    value, product = tensor_of(f), sole_user(node)
    if given is None or value is None or not calls(product, *MUL) or product.kwargs or given.get("p", 2) != 2:
        return None
    length, (scale,) = fixed(value.shape[-1]), [o for o in _operands(product) if o is not node] or [None]
    eps, last = given.get("eps", 1e-12), given.get("dim", 1) in (-1, value.dim() - 1)
    if not (last and length and isinstance(eps, float) and 0 <= eps <= 1e-12 and isinstance(scale, (int, float))):
        return None
    if not math.isclose(scale, math.sqrt(length), rel_tol=1e-6):
        return None
    return _Root(f, eps**2 / length, [node], product, f)


def _by_deviation(node: fx.Node) -> MatchRecord | None:
    """The record of (g - mean(g)) / (std(g) + eps), which is no norm of te's; None of any other node."""
    total = sole_user(node) if calls(node, *_DEVIATION) else None
    quotient = sole_user(total) if total is not None and calls(total, *ADD) else None
    if quotient is None or not calls(quotient, *DIV) or quotient.args[1:] != (total,):
        return None
    divided = quotient.args[0]
    if not any(_differences(o, o) for o in (divided, *(_operands(divided) if calls(divided, *MUL) else ()))):
        return None
    reason = "it divides by the standard deviation plus eps, te.layer_norm by the root of the variance plus eps"
    return record("layer_norm", quotient, reason)


def _centered(root: _Root) -> _Root | None:
    """The same root as LayerNorm's: f is g - mean(g), and nothing but the norm reads these."""
    difference = root.normed if calls(root.nodes[0], *_VARIANCE) else root.f
    if not _differences(difference, difference):
        return None
    g, mean = difference.args
    assert isinstance(g, fx.Node) and isinstance(mean, fx.Node)
    differences = tuple(user for user in mean.users if _differences(difference, user))
    readers = {user for difference in differences for user in difference.users}
    if len(differences) != len(mean.users) or not readers <= {root.nodes[0], root.weighted or root.product}:
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


def _variance_of_last(variance: fx.Node) -> Any:
    """What a variance over the last dimension with keepdim reads, divided by N and not by N - 1; None for another one."""
    given = arguments(variance, "input", "dim", "unbiased", "keepdim", "correction") or {}
    value, dim = tensor_of(given.get("input")), given.get("dim")
    dim = dim[0] if isinstance(dim, (tuple, list)) and len(dim) == 1 else dim
    divisor = [given[name] for name in ("unbiased", "correction") if name in given]
    if value is None or given.get("keepdim") is not True or divisor not in ([False], [0]):
        return None
    return given["input"] if dim in (-1, value.dim() - 1) else None


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


def _product(r: fx.Node, is_f: Callable[[Any], bool], inverse: bool) -> tuple[fx.Node, fx.Node, fx.Node | None] | None:
    """f * r, or f / r where r is no inverse; f as it has it; the product of f and a weight, where that stands for f.

    x for f, with x the tensor f was cast from, is the same value: r is fp32 and promotes it.
    """
    for user in r.users:
        if not calls(user, *(MUL if inverse else DIV)) or user.kwargs or (not inverse and user.args[1] is not r):
            continue
        other: Any = next((o for o in _operands(user) if o is not r), None)
        if is_f(other):
            return user, other, None
        if calls(other, *MUL) and sole_user(other) is user:
            for normed in _operands(other):
                if is_f(normed) and _of_columns(other, normed) is not None:
                    return user, normed, other
    return None


def _scaling(root: _Root, dtype: torch.dtype) -> _Scaling:
    """Reads downwards from f * r, for an x of `dtype`."""
    found = _Scaling([root.product], layer=bool(root.centering))
    if root.weighted is not None and _read_weight(root.weighted, root.normed, found):
        found.nodes.insert(0, root.weighted)
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
