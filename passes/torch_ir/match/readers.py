"""Whether a norm or an activation is worth taking from Inductor: only next to an FP8 linear does it ever get
fused, and only in a format that a fused kernel writes."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from te_dynamo.dialect.linear import LinearConfig
from te_dynamo.passes.torch_ir.match.autocast import is_body
from te_dynamo.passes.torch_ir.match.patterns.linears.shards import keeps_shards
from te_dynamo.passes.torch_ir.match.values import calls, dtype_name, tensor_of

INSIDE = "te_inside"
"""In the meta of a node inside a norm or an activation that is left: its row would be one more of the same."""

_VIEWS = {torch.reshape, torch.flatten, torch.squeeze, torch.unsqueeze, torch.unflatten}
_VIEW_METHODS = {
    "view", "reshape", "view_as", "reshape_as", "flatten", "unflatten", "squeeze", "unsqueeze", "contiguous",
    "to", "type_as", "float", "half", "bfloat16",
}  # fmt: skip
_HALVES = (torch.bfloat16, torch.float16)
_MOVES = {torch.permute, torch.transpose, torch.swapaxes, torch.roll, F.pad, torch._C._nn.pad}
_MOVE_METHODS = {"permute", "transpose", "swapaxes", "roll"}
_PARTS = {torch.chunk, torch.split, torch.tensor_split}
_PART_METHODS = {"chunk", "split", "tensor_split"}


def why_not_read_by_linear(node: fx.Node, rounds: bool = False) -> str:
    """ "" when a matched linear reads `node`, itself or through views that keep all its elements in order, and a fused
    kernel could write what it reads.

    rounds: that kernel may round `node` to 16 bits before it quantizes it, as a cast before the linear does.
    """
    seen, queue, cast, other, apart = {node}, [node], "", "", ""
    while queue:
        current = queue.pop()
        for user in current.users:
            if _is_te_linear(user) and user.args[0] is current:
                quantizer = _config(user).input_quantizer
                if quantizer.fused_producers:
                    return ""
                other = f"no fused kernel writes {quantizer.in_words()}; left to Inductor"
            if isinstance(user.target, torch._ops.HigherOrderOperator) or (user.op == "output" and is_body(user.graph)):
                apart = (
                    "it is read across the border of a region (a checkpoint), where nothing is fused; left to Inductor"
                )
            if user not in seen and _keeps_elements(user, current):
                seen.add(user)
                same = _same_dtype(user, current)
                if same or (rounds and rounds_to_16_bits(user)):
                    queue.append(user)
                elif any(_is_te_linear(reader) and reader.args[0] is user for reader in user.users):
                    cast = f"it is {_dtype(node)}, the FP8 linear reading it {_dtype(user)}; left to Inductor"
                if not same:
                    apart = f"it is {_dtype(node)} and goes on as {_dtype(user)}, and is not what an FP8 linear reads; left to Inductor"
    return other or cast or apart or _why_not_read_in_order(node)


def _why_not_read_in_order(node: fx.Node) -> str:
    """The reason where no linear reads `node` as it lies: one may read it with its rows moved, as Swin's windows are."""
    seen, queue = {node}, [node]
    while queue:
        current = queue.pop()
        for user in current.users:
            if _is_te_linear(user) and user.args[0] is current:
                return "the FP8 linear reads it permuted or padded, and fused kernels keep the rows' order; left to Inductor"
            moves = calls(user, _MOVES, _MOVE_METHODS) and user.args[:1] == (current,)
            if user not in seen and (moves or _keeps_elements(user, current)):
                seen.add(user)
                queue.append(user)
    return "no FP8 linear reads its output; left to Inductor"


def comes_from_linear(node: fx.Node) -> bool:
    """Whether `node` is the output of a matched linear, or a view or part of it, and a fused kernel could write the gradient
    that this linear reads."""
    linear = linear_behind(node)
    dy = None if linear is None else _config(linear).grad_output_quantizer
    return dy is not None and dy.fused_producers


def linear_behind(node: Any) -> fx.Node | None:
    """The matched linear whose output `node` is, or a view or part of it."""
    while isinstance(node, fx.Node):
        if node.op not in ("call_function", "call_method") or not node.args or not isinstance(node.args[0], fx.Node):
            return None
        source = node.args[0]
        if calls(node, {operator.getitem}):
            if _is_te_linear(source):
                return source if node.args[1] == 0 else None
            if not calls(source, _PARTS, _PART_METHODS) and tensor_of(source) is None:
                return None
        elif not calls(node, _PARTS, _PART_METHODS) and not (
            _keeps_elements(node, source) and _same_dtype(node, source)
        ):
            return None
        node = source
    return None


def with_one_row(nodes: Sequence[fx.Node]) -> fx.Node:
    """The last node of a norm or an activation that is left, for its row; the others get none."""
    for node in nodes[:-1]:
        node.meta[INSIDE] = True
    return nodes[-1]


def why_its_strides_stay(node: fx.Node) -> str:
    """ "" where `node` may as well be contiguous, as results of te operations are; else why not: a view of it that the user
    wrote may hold for its own strides alone. te.linear takes any."""
    value = tensor_of(node)
    if value is None or value.is_contiguous() or all(_is_te_linear(user) for user in node.users):
        return ""
    return f"its result has the strides {list(value.stride())} and is read by other than linears; left to Inductor"


def _is_te_linear(node: fx.Node) -> bool:
    """Whether it is a linear of one weight, or of a group's. Both take x first and their configuration fourth."""
    return calls(node, {torch.ops.te.linear.default, torch.ops.te.grouped_linear.default})


def _config(node: fx.Node) -> LinearConfig:
    config = node.args[3]
    assert isinstance(config, LinearConfig)
    return config


def _keeps_elements(user: fx.Node, node: fx.Node) -> bool:
    """Whether `user` holds all elements of `node`, in order, as a tensor of another shape (or of another
    dtype)."""
    if not user.args or user.args[0] is not node:
        return False
    if calls(user, _VIEWS, _VIEW_METHODS) or keeps_shards(user, node):
        return True
    if calls(user, {operator.getitem}):  # hidden[:, slice(0, None), :], which Hugging Face's lm_head reads
        return _whole(user.args[1]) and tensor_of(user) is not None and tensor_of(user).shape == tensor_of(node).shape
    return calls(user, {F.dropout}) and (user.kwargs.get("training", user.args[2:3]) in (False, (False,)))


def _whole(index: object) -> bool:
    items = index if isinstance(index, tuple) else (index,)
    return all(i is Ellipsis or (isinstance(i, slice) and i.start in (0, None) and i.step in (1, None)) for i in items)


def rounds_to_16_bits(node: fx.Node) -> bool:
    """Whether a view that keeps all elements casts fp32 to bf16 or fp16."""
    before, after = tensor_of(node.args[0]), tensor_of(node)
    return before is not None and after is not None and before.dtype == torch.float32 and after.dtype in _HALVES


def _same_dtype(a: fx.Node, b: fx.Node) -> bool:
    x, y = tensor_of(a), tensor_of(b)
    return x is not None and y is not None and x.dtype == y.dtype


def _dtype(node: fx.Node) -> str:
    value = tensor_of(node)
    return "unknown" if value is None else dtype_name(value.dtype)
