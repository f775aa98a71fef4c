"""F.layer_norm and F.rms_norm -> te.layer_norm, te.rms_norm.

    y = layer_norm(x, (N,), weight, bias, eps)    ->    y = te.layer_norm(x, weight, bias, eps)[0]
    y = rms_norm(x, (N,), weight, eps)            ->    y = te.rms_norm(x, weight, eps, False, False)[0]

A norm of x.float(), cast back to x's dtype, is the norm of x: both compute in fp32 and round once. Of another dtype than x is the norm
that autocast computes in fp32, and that a linear reads in bf16: te.layer_norm(x, weight, bias, eps, bf16). Where somebody reads its
fp32 too, the casts stay (passes/dialect/fusions/norm_quantize.py).

Norms written out in a model: written_norm.py.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from te_dynamo.passes.torch_ir.match.memory import memory_of, share
from te_dynamo.passes.torch_ir.match.mutation import is_written, refuses
from te_dynamo.passes.torch_ir.match.readers import (
    rounds_to_16_bits,
    why_its_strides_stay,
    why_not_read_by_linear,
    with_one_row,
)
from te_dynamo.passes.torch_ir.match.values import (
    FLOATS,
    arguments,
    calls,
    dtype_name,
    emit,
    emit_getitem,
    emit_method,
    erase_unused,
    fixed,
    is_number,
    left_as_plain,
    number,
    replace,
    sole_user,
    tensor_of,
)
from te_dynamo.passes.torch_ir.match.where import record
from te_dynamo.report import MatchRecord

_LAYER_NORM = {F.layer_norm, torch.layer_norm}
_RMS_NORM = {F.rms_norm, torch.rms_norm}
_CASTS = {"to", "type", "type_as", "float", "half", "bfloat16"}


@dataclasses.dataclass(frozen=True)
class Norm:
    """A recognised norm over the last dimension: `last` gives what the te operation of that `kind` will give.

    nodes:   the user's nodes, `last` at the end.
    weights: weight for rms_norm, (weight, bias) for layer_norm; [N] each, or None.
    options: what follows them in the operation's schema, eps first.

    Of layer_norm_modulate, weight and bias are [B, 1, .., N].
    """

    kind: str
    x: Any  # a node
    weights: tuple[fx.Node | None, ...]
    options: tuple[Any, ...]
    nodes: tuple[fx.Node, ...]

    @property
    def last(self) -> fx.Node:
        return self.nodes[-1]


def match_norm(node: fx.Node) -> MatchRecord | None:
    """Replaces a call of layer_norm or rms_norm by its te operation where that pays; None when `node` is
    neither."""
    norm = called_norm(node)
    return replace_norm(norm) if isinstance(norm, Norm) else norm


def called_norm(node: fx.Node) -> Norm | MatchRecord | None:
    """The norm that a call of layer_norm or rms_norm is, or the record of why it is none that te has; None when `node` is
    neither."""
    if calls(node, _LAYER_NORM):
        kind = "layer_norm"
        given = arguments(node, "input", "normalized_shape", "weight", "bias", "eps", "cudnn_enable")
    elif calls(node, _RMS_NORM):
        kind = "rms_norm"
        given = arguments(node, "input", "normalized_shape", "weight", "eps")
    else:
        return None
    x = (given or {}).get("input")
    if given is None or tensor_of(x) is None:
        return record(kind, node, "its arguments are not those of torch's own function")
    if len(given["normalized_shape"]) != 1:
        return record(
            kind, node, f"it normalizes {len(given['normalized_shape'])} dimensions; te.{kind} takes the last"
        )
    if kind == "layer_norm":
        return _of_what_was_cast(
            Norm(kind, x, (given.get("weight"), given.get("bias")), (given.get("eps", 1e-5),), (node,))
        )
    eps = given.get("eps")
    # None is the epsilon of the precision the mean is computed in, whatever torch's documentation says of
    # x's own
    eps = torch.finfo(torch.float32).eps if eps is None else eps
    return _of_what_was_cast(Norm(kind, x, (given.get("weight"),), (eps, False, False), (node,)))


def _of_what_was_cast(norm: Norm) -> Norm:
    """The norm of x, where `norm` is of x.float() and nobody else reads that, or its sole reader casts back to x's dtype; with the
    casts behind it that change nothing, and of weights before their casts."""
    while is_cast(same := sole_user(norm.last)) and tensor_of(same).dtype == tensor_of(norm.last).dtype:
        norm = dataclasses.replace(norm, nodes=(*norm.nodes, same))
    weights = [before_casts(weight) for weight in norm.weights]
    nodes = {*norm.nodes, *(cast for _, its_casts in weights for cast in its_casts)}
    x, casts = before_casts(norm.x)
    back = sole_user(norm.last)
    if casts and is_cast(back) and tensor_of(back).dtype == tensor_of(x).dtype:
        nodes |= {*casts, back}
    elif all(set(cast.users) <= {*casts, *norm.nodes} for cast in casts):
        nodes |= {*casts}
    else:
        x = norm.x
    return dataclasses.replace(norm, x=x, weights=tuple(weight for weight, _ in weights), nodes=tuple(sorted(nodes)))


def replace_norm(norm: Norm) -> MatchRecord:
    """Puts the te operation in the norm's place, or leaves it; either way its record."""
    last = norm.last
    casts = _roundings(last)
    results = casts or [last]
    reason = why_no_te_norm(norm) or why_not_read_by_linear(last, rounds=True)
    reason = reason or next(filter(None, map(why_its_strides_stay, results)), "") or refuses((*norm.nodes, *casts))
    if reason:
        return record(norm.kind, with_one_row(norm.nodes), reason)
    graph, op = last.graph, getattr(torch.ops.te, norm.kind).default
    eps, *options = norm.options
    if (dtype := tensor_of(results[0]).dtype) != tensor_of(norm.x).dtype:
        options.append(dtype)
    with graph.inserting_before(last):
        new = emit_getitem(graph, emit(graph, op, (norm.x, *norm.weights, number(eps), *options), last), 0)
        apart = len(casts) > 1 and _stay_apart(casts)
        others = [emit_method(graph, "clone", (new,), last) if apart else new for _ in results[1:]]
    matched = record(norm.kind, results[0])
    for result, value in zip(results, (new, *others), strict=True):
        replace(result, value)
    erase_unused(graph, (*norm.nodes, *casts))
    return matched


def _roundings(last: fx.Node) -> list[fx.Node]:
    """The casts to one 16-bit dtype that alone read a norm's fp32 result; [] where there are others."""
    casts = [user for user in last.users if is_cast(user) and rounds_to_16_bits(user)]
    alike = len({tensor_of(cast).dtype for cast in casts}) == 1
    return casts if alike and len(casts) == len(last.users) else []


def _stay_apart(casts: list[fx.Node]) -> bool:
    """Whether casts of one tensor are no one tensor: something writes one, or the graph returns one."""
    returned = casts[0].graph.output_node().all_input_nodes
    return is_written(*casts) or any(share(memory_of(cast), memory_of(result)) for cast in casts for result in returned)


def why_no_te_norm(norm: Norm) -> str:
    """Why te's norm does not compute this one, whatever reads it; "" where it does."""
    return left_as_plain(norm.x, norm.last, *norm.weights) or _reason(norm)


def _reason(norm: Norm) -> str:
    x, out = tensor_of(norm.x), tensor_of(norm.last)
    if x.dtype not in FLOATS:
        return f"its input is {dtype_name(x.dtype)}; te.{norm.kind} takes bf16, fp16 and fp32"
    if out.dtype not in FLOATS:
        return f"its output is {dtype_name(out.dtype)}; te.{norm.kind} gives bf16, fp16 and fp32"
    columns = fixed(x.shape[-1])
    if columns is None:
        return f"its last dimension is dynamic ({x.shape[-1]})"
    for weight in norm.weights:
        expected = (columns,) if norm.kind != "layer_norm_modulate" else tuple(tensor_of(weight).shape)
        if weight is not None and tuple(tensor_of(weight).shape) != expected:
            return f"its weight or bias has shape {list(tensor_of(weight).shape)}; expected [{columns}]"
        if weight is not None and tensor_of(weight).dtype not in FLOATS:
            return f"its weight or bias is {dtype_name(tensor_of(weight).dtype)}"
    if not is_number(norm.options[0]):
        return "its eps is not a Python number"
    return ""


def before_casts(node: Any) -> tuple[Any, list[fx.Node]]:
    """(what was cast to fp32, the casts): through casts that lose nothing; the node itself when none was."""
    casts = []
    while is_cast(node) and tensor_of(node).dtype == torch.float32 and tensor_of(node.args[0]).dtype in FLOATS:
        casts.append(node)
        node = node.args[0]
    return node, casts


def is_cast(node: Any) -> bool:
    """Whether a node changes its input's dtype and nothing else."""
    if not calls(node, set(), _CASTS):
        return False
    before, after = tensor_of(node.args[0]), tensor_of(node)
    return before is not None and after is not None and before.device == after.device and before.layout == after.layout
