"""Results that lie in memory in another way than those of the user's call: as those do where the user's code can tell."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from te_dynamo.passes.torch_ir.match.autocast import is_body
from te_dynamo.passes.torch_ir.match.memory import memory_of, share, storages_of
from te_dynamo.passes.torch_ir.match.mutation import is_written
from te_dynamo.passes.torch_ir.match.values import emit_method, fixed, hint, name_of, tensor_of
from te_dynamo.passes.torch_ir.match.writes import changes_form, is_known, written_by


def readable(node: fx.Node, new: fx.Node) -> fx.Node:
    """`new`, to stand in the place of `node`, or a copy of it with the strides of `node`."""
    if _can_be_read(node, tensor_of(new)):
        return new
    order = _order(tensor_of(node), 0)
    if order == sorted(order):
        return emit_method(node.graph, "contiguous", (new,), node)
    copy = emit_method(node.graph, "contiguous", (emit_method(node.graph, "permute", (new, *order), node),), node)
    return emit_method(node.graph, "permute", (copy, *map(order.index, range(len(order)))), node)


def _can_be_read(node: fx.Node, value: Any) -> bool:
    """Whether those that read `node` do the same with `value`, which has other strides: its views can be made, and share its memory where
    they did, or nobody writes there. The same holds for readers of what takes over its strides, such as a sum. Nobody knows that of
    a body and of a user's own operation. Behind the graph rows may be longer, but dimensions lie in their order."""
    for user in node.users:
        if user.op == "output":
            if is_body(user.graph) or _order(tensor_of(node)) != _order(value):
                return False
            continue
        if not _reads_any_strides(user) or ((written := written_by(user)) and changes_form(user)):
            return False
        result, shares = value, share(memory_of(user), memory_of(node))
        if node not in written:
            try:
                result = _run(user, node, value)
            except (RuntimeError, ValueError):
                if shares:
                    return False
                continue
            if share(storages_of(result), storages_of(value)) != shares and is_written(node, user):
                return False
            if not shares and _orders(result) == _orders(user.meta.get("example_value")):
                continue
        if not _can_be_read(user, result):
            return False
    return True


def _orders(result: Any) -> list[list[int]]:
    return [_order(each) for each in tree_leaves(result) if isinstance(each, torch.Tensor)]


def _order(tensor: Any, least: int = 2) -> list[int]:
    """The dimensions of at least so many elements, the outermost in memory first."""
    dims = [d for d, size in enumerate(tensor.shape) if fixed(size) is None or size >= least]
    return sorted(dims, key=lambda d: hint(tensor.stride(d)), reverse=True)


def _reads_any_strides(user: fx.Node) -> bool:
    target = user.target
    if name_of(user) == "as_strided" or isinstance(target, torch._ops.HigherOrderOperator):
        return False
    return target.namespace in ("aten", "te", "prims") if isinstance(target, torch._ops.OpOverload) else is_known(user)


def _run(user: fx.Node, node: fx.Node, value: Any) -> Any:
    """What the call gives for `value` in the place of `node`."""
    args, kwargs = fx.map_arg((user.args, user.kwargs), lambda n: value if n is node else n.meta["example_value"])
    mode = next(v.fake_mode for v in tree_leaves(value) if isinstance(v, FakeTensor))
    run = user.target if callable(user.target) else getattr(torch.Tensor, str(user.target))
    with mode, torch.no_grad(), mode.shape_env.ignore_fresh_unbacked_symbols():  # type: ignore[union-attr]
        return run(*args, **kwargs)
