"""Which tensors of a graph are weights: what is made of parameters alone, however the model takes, scales or masks them.

W[i], W.unbind(0)[i], W[:, :n], W.view(..)     a part, or another shape
W.t().contiguous(), W.detach(), W.bfloat16()   another layout, precision or gradient
W * mask, W * .5, a + b                        computed from parameters, buffers and numbers
"""

from __future__ import annotations

import contextlib
import contextvars
import enum
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from te_dynamo.passes.torch_ir.match.values import name_of, tensor_of


class Origin(enum.IntEnum):
    """What a tensor is made of. Of several the largest counts."""

    CONSTANT = 0  # numbers and buffers
    PARAMETER = 1  # parameters too
    PRODUCT = 2  # matrix products of parameters too: a merged LoRA, attention's queries that are learned
    INPUT = 3  # anything that the model is called with


_PRODUCTS = {
    "linear", "matmul", "__matmul__", "mm", "bmm", "addmm", "addbmm", "baddbmm", "einsum", "tensordot", "inner", "linalg_matmul",
    "linalg_multi_dot", "scaled_dot_product_attention", "multi_head_attention_forward", "grouped_linear",
}  # fmt: skip

_known: contextvars.ContextVar[dict[fx.Node, Origin] | None] = contextvars.ContextVar("te_dynamo_origins", default=None)


@contextlib.contextmanager
def origins_known() -> Iterator[None]:
    """Inside, the origin of each node is found once; without it each question reads all that the node depends on."""
    token = _known.set({})
    try:
        yield
    finally:
        _known.reset(token)


def origin_of(node: Any) -> Origin:
    """What a node is made of; INPUT for what is no node of tensors."""
    if not isinstance(node, fx.Node):
        return Origin.INPUT
    known = _known.get()
    known = {} if known is None else known
    waiting = [node]
    while waiting:  # no recursion: graphs are thousands of nodes deep
        current = waiting[-1]
        if unknown := [operand for operand in current.all_input_nodes if operand not in known]:
            waiting += unknown
        else:
            known[waiting.pop()] = _origin(current, [known[operand] for operand in current.all_input_nodes])
    return known[node]


def _origin(node: fx.Node, operands: list[Origin]) -> Origin:
    if node.op in ("placeholder", "get_attr"):
        if is_module_parameter(node):
            return Origin.PARAMETER
        constant = node.op == "get_attr" or "_buffers_" in str(node.target) or tensor_of(node) is None
        return Origin.CONSTANT if constant else Origin.INPUT
    found = max(operands, default=Origin.CONSTANT)
    if found is Origin.PARAMETER and name_of(node) in _PRODUCTS:
        return Origin.PRODUCT
    return found


def is_module_parameter(node: fx.Node | None) -> bool:
    """Whether an input of the graph is an nn.Parameter, of a body too, or what FSDP has in the place of one."""
    return node is not None and (
        isinstance(tensor_of(node), torch.nn.Parameter)
        or (isinstance(node.type, type) and issubclass(node.type, torch.nn.Parameter))
        or "_parameters_" in str(node.target)
    )


def parameters_below(node: Any) -> Iterator[fx.Node]:
    """The parameters that a weight is made of; the first says whose it is."""
    waiting, seen = [node] if isinstance(node, fx.Node) else [], set()
    while waiting:
        current = waiting.pop()
        if is_module_parameter(current) and current.op in ("placeholder", "get_attr"):
            yield current
        fresh = [operand for operand in current.all_input_nodes if operand not in seen]
        seen.update(fresh)
        waiting += reversed(fresh)
