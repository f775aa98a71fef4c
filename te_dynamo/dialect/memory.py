"""Which memory a node's value lies in: who writes it, what shares it, and whether it may be written in place.

Answers go by what the nodes are: their values' storages change from pass to pass.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_functional
from torch.fx import Node

from te_dynamo.dialect.define import REFERENCE_ONLY, is_te
from te_dynamo.kernels.runtime.launch import size_hint

_aten = torch.ops.aten

RESHAPES = (_aten.view.default, _aten._unsafe_view.default, _aten.reshape.default)
"""The operations that give a tensor another shape over the same data in the same order."""

CASTS = {_aten._to_copy.default, torch.ops.prims.convert_element_type.default}
_COPIES = {_aten.clone.default, *CASTS}
"""Copies that Inductor fuses with what reads or writes them, so that there may be none."""

_PRODUCTS = {_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default}


def is_view(node: Any) -> bool:
    """Whether a node's value is its first argument's memory, or some of it."""
    if not isinstance(node, Node):
        return False
    if node.target is operator.getitem:
        return is_view(node.args[0])  # of a split, say
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and (target.is_view or target is _aten._unsafe_view.default)


def before_reshapes(value: Any) -> Any:
    """The tensor that `value`, an argument of a node, has the data of in another shape; itself if it is none of RESHAPES."""
    while isinstance(value, Node) and value.target in RESHAPES:
        value = value.args[0]
    return value


def is_copy(node: Node) -> bool:
    """Whether a node's value is its first argument's, in another memory or dtype."""
    return node.target in _COPIES


def origin(value: Any) -> Any:
    """What views and items are taken from."""
    while is_view(value) or (isinstance(value, Node) and value.target is operator.getitem):
        value = value.args[0]
    return value


def is_returned(node: Node) -> bool:
    """Whether the graph gives the memory of a node's value to its caller."""
    return any(
        user.op == "output" or ((is_view(user) or user.target is operator.getitem) and is_returned(user))
        for user in node.users
    )


def is_written_input(node: Node) -> bool:
    """Whether a node is an input that the graph writes at its end: backward would read what was written."""
    return node.op == "placeholder" and any(
        user.target is _aten.copy_.default and user.args[0] is node for user in node.users
    )


def byte_hint(value: torch.Tensor) -> int:
    """Bytes of a tensor; of a symbolic size what is known while compiling, without a guard."""
    return size_hint(value.numel()) * value.element_size()


def is_product(node: Node) -> bool:
    """Whether a node is a matrix product of torch's."""
    return node.target in _PRODUCTS


def written_by_inductor(tensor: Node) -> bool:
    """Whether Inductor's own code, and not an input, a GEMM or a kernel of ours, writes `tensor`."""
    target = before_reshapes(tensor).target
    return isinstance(target, torch._ops.OpOverload) and (target in _COPIES or torch.Tag.pointwise in target.tags)


def is_in_memory(node: Node) -> bool:
    """Whether a tensor is written to memory whoever reads it."""
    if len(node.users) > 1 or node.op != "call_function":
        return True
    if node.target in RESHAPES or node.target is operator.getitem:
        return is_in_memory(node.args[0])  # type: ignore[arg-type]
    return _is_kernels(node)


def must_be_written(node: Node) -> bool:
    """Whether somebody reads a tensor whom Inductor cannot fuse with what computes it."""
    return any(
        must_be_written(user) if user.target in RESHAPES else user.op == "output" or _is_kernels(user)
        for user in node.users
    )


def has_own_buffer(tensor: Any) -> bool:
    """Whether Inductor has a buffer for that value alone: one that a launch or an extern kernel writes."""
    while is_view(tensor):
        tensor = tensor.args[0]
    owners = (_aten.empty.memory_format, _aten.mm.default, _aten.addmm.default)
    return isinstance(tensor, Node) and (is_te(tensor.target) or tensor.target in owners)


def may_be_overwritten(tensor: Node, reader: Node) -> bool:
    """Whether the graph made the memory of `tensor`, and nothing but `reader`, once, reads it then or later."""
    made: Any = tensor
    while _may_share_memory(made):
        made = made.args[0]
    if not (isinstance(made, Node) and _makes_memory(made)):
        return False
    names = list(_names_of(made))
    here = [name for name in names if reader in name.users]
    return here == [tensor] and all(user is reader or user < reader for name in names for user in name.users)


def _names_of(made: Node) -> Iterator[Node]:
    """The nodes whose memory is, or may be, that of `made`."""
    yield made
    for user in made.users:
        if _may_share_memory(user):
            yield from _names_of(user)


def _may_share_memory(node: Any) -> bool:
    return is_view(node) or (isinstance(node, Node) and node.target in _COPIES)


def _makes_memory(node: Node) -> bool:
    """Whether a node's result is memory of its own: of a call that is no view and writes nothing in place."""
    if node.target is not operator.getitem:
        return _is_functional(node.target)
    of: Any = node.args[0].target  # type: ignore[union-attr]
    return of is triton_kernel_wrapper_functional or is_te(of) or (_is_functional(of) and of.namespace == "aten")


def _is_functional(target: Any) -> bool:
    """Whether an operation's results share no memory with its arguments, as far as its schema says."""
    return (
        isinstance(target, torch._ops.OpOverload)
        and not target._schema.is_mutable
        and all(result.alias_info is None for result in target._schema.returns)
    )


def _is_kernels(node: Node) -> bool:
    """Whether a kernel that Inductor does not write computes a node."""
    return node.target in _PRODUCTS or (is_te(node.target) and node.target not in REFERENCE_ONLY)
