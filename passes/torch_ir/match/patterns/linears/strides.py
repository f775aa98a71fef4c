"""Results that lie in memory in another way than those of the user's call: contiguous where a view that the user wrote needs that."""

from __future__ import annotations

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from te_dynamo.passes.torch_ir.match.values import calls, emit_method, tensor_of

__all__ = ["readable"]

_VIEWS = {torch.Tensor.view, torch.transpose, torch.permute, torch.unsqueeze, torch.squeeze, torch.unflatten}
_VIEW_METHODS = {"view", "view_as", "transpose", "permute", "unsqueeze", "squeeze", "unflatten", "t"}


def readable(node: fx.Node, new: fx.Node) -> fx.Node:
    """`new`, to stand in the place of `node`, or a contiguous copy of it."""
    return new if _can_be_read(node, tensor_of(new)) else emit_method(node.graph, "contiguous", (new,), node)


def _can_be_read(node: fx.Node, value: torch.Tensor) -> bool:
    """Whether all views of `node` can be made of a tensor with the strides of `value`."""
    for user in node.users:
        if user.target in ("as_strided", torch.as_strided):
            return False
        if calls(user, _VIEWS, _VIEW_METHODS) and user.args[0] is node:
            args, kwargs = fx.map_arg((user.args[1:], user.kwargs), lambda n: n.meta["example_value"])
            run = user.target if callable(user.target) else getattr(torch.Tensor, str(user.target))
            assert isinstance(value, FakeTensor)
            try:
                with value.fake_mode:
                    view = run(value, *args, **kwargs)
            except (RuntimeError, ValueError):
                return False
            if not _can_be_read(user, view):
                return False
    return True
