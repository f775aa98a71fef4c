"""What the fusions of a sum share: which additions they take, and which tensors are in memory whoever reads them."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true, sym_eq

from te_dynamo.dialect.define import REFERENCE_ONLY, is_te
from te_dynamo.passes.dialect.graph import RESHAPES

__all__ = ["is_in_memory", "is_plain_sum", "must_be_written"]

_aten = torch.ops.aten
_PRODUCTS = {_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default}


def is_plain_sum(node: Any) -> bool:
    """x + y of two contiguous tensors of one shape and dtype, the result's."""
    if not (isinstance(node, Node) and node.target is _aten.add.Tensor) or node.kwargs:
        return False
    total: torch.Tensor = node.meta["val"]
    operands = [arg.meta["val"] if isinstance(arg, Node) else None for arg in node.args]
    return total.is_contiguous() and all(
        isinstance(value, torch.Tensor)
        and value.dtype == total.dtype
        and value.dim() == total.dim()
        and statically_known_true(sym_eq(tuple(value.shape), tuple(total.shape)))
        and value.is_contiguous()
        for value in operands
    )


def is_in_memory(node: Node) -> bool:
    """Whether a tensor is written to memory whoever adds it up."""
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


def _is_kernels(node: Node) -> bool:
    """Whether a kernel that Inductor does not write computes a node."""
    return node.target in _PRODUCTS or (is_te(node.target) and node.target not in REFERENCE_ONLY)
