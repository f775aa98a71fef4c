"""Where in the user's model a node comes from: the module's path and the source line."""

from __future__ import annotations

import contextvars

from torch import fx

from te_dynamo import _compat
from te_dynamo.user_code import OWNERS, clean_path, source_line

__all__ = [
    "module_path",
    "parameter_name",
    "path_prefix",
    "source_line",
    "source_name",
]

path_prefix: contextvars.ContextVar[str | None] = contextvars.ContextVar("te_dynamo_path_prefix", default=None)
"""What stands before every path of the graph being matched ("" or "layers.0."); None where that is not known."""


def module_path(node: fx.Node, weight: fx.Node | None = None) -> str:
    """The path of the module whose forward made the node, as `named_modules` of the whole model spells it
    ("layers.0.mlp.down_proj"); without one the path of the weight's owner; "" for the model itself and where
    the graph says nothing."""
    stack = node.meta.get("nn_module_stack")
    local = clean_path(next(reversed(stack.values()))[0]) if stack else parameter_name(weight).rpartition(".")[0]
    prefix = path_prefix.get()
    if prefix is not None:
        return f"{prefix}{local}".removesuffix(".")
    owners = weight.meta.get(OWNERS, []) if weight is not None else []
    last = local.rpartition(".")[2]
    return next((owner for owner in owners if owner.rpartition(".")[2] == last), owners[0] if owners else local)


def parameter_name(placeholder: fx.Node | None) -> str:
    """A graph input as the compiled function spells it ("down_proj.weight"), "" where Dynamo does not say."""
    return clean_path(source_name(placeholder))


def source_name(placeholder: fx.Node | None) -> str:
    """A graph input as Dynamo spells it ("L['x']"), "" where it does not say."""
    source = getattr(placeholder, "_dynamo_source", None)
    if source is None:
        return ""
    return _compat.source_name(source)
