"""Where in the user's model a node comes from: the module's path and the source line."""

from __future__ import annotations

import contextvars
import itertools
from typing import Any

import torch
from torch import fx

from te_dynamo import _compat
from te_dynamo.kernels.runtime.target import target_of
from te_dynamo.passes.torch_ir.match.origins import parameters_below
from te_dynamo.passes.torch_ir.match.patterns.linears.products import without_casts
from te_dynamo.passes.torch_ir.match.values import dtype_name, tensor_of
from te_dynamo.recipe import Recipe
from te_dynamo.report import MatchRecord
from te_dynamo.user_code import OWNERS, clean_path, has_own_path, module_here
from te_dynamo.user_code import source_line as source_line

SOURCE = "te_dynamo_source"
"""In the meta of a body's input: Dynamo's source of the graph's input that it is."""

path_prefix: contextvars.ContextVar[str | None] = contextvars.ContextVar("te_dynamo_path_prefix", default=None)
"""What stands before every path of the graph being matched ("" or "layers.0."); None where that is not known."""


def record(kind: str, node: fx.Node, reason: str = "") -> MatchRecord:
    """That `node`, which is no linear, was matched as a `kind`, or the reason why not."""
    value = tensor_of(node)
    dtype = "" if value is None else dtype_name(value.dtype)
    return MatchRecord(kind, module_path(node), source_line(node), matched=not reason, reason=reason, dtype=dtype)


def emulated_on(recipe: Recipe | None, value: torch.Tensor | None) -> str:
    """`MatchRecord.emulated_on` of a linear that multiplies `value`."""
    if recipe is None or value is None or value.device.type != "cuda":
        return ""
    target = target_of(value.device)
    return target.name if recipe.is_emulated(target) else ""


def module_path(node: fx.Node, weight: fx.Node | None = None) -> str:
    """The path of the module whose forward made the node, as `named_modules` of the whole model spells it
    ("layers.0.mlp.down_proj"); without one the path of the weight's owner; "" for the model itself and where
    the graph says nothing."""
    local = module_here(node)
    local = parameter_name(weight).rpartition(".")[0] if local is None else local
    prefix = path_prefix.get()
    if prefix is not None:
        return f"{prefix}{local}".removesuffix(".")
    owners = weight.meta.get(OWNERS, []) if weight is not None else []
    last = local.rpartition(".")[2]
    return next((owner for owner in owners if owner.rpartition(".")[2] == last), owners[0] if owners else local)


def linear_path(node: fx.Node, weight: Any) -> tuple[str, str]:
    """(the path of a linear, the parameter's part of it): ("blocks.0.qkv_w", "qkv_w") of a parameter that the module holds under
    a name of its own; (`module_path`, "") of `weight`, and of what several parameters make."""
    below = list(itertools.islice(parameters_below(weight), 2))
    path = module_path(node, below[0] if below else without_casts(weight))
    name, here = parameter_name(below[0]) if len(below) == 1 else "", module_here(node)
    own = name.rpartition(".")[2] if here is None else name.removeprefix(f"{here}." if here else "")
    if not has_own_path(own) or (here and own == name):
        return path, ""
    return f"{path}.{own}".removeprefix("."), own


def parameter_name(placeholder: fx.Node | None) -> str:
    """A graph input as the compiled function spells it ("down_proj.weight"), "" where Dynamo does not say."""
    return clean_path(source_name(placeholder))


def source_name(placeholder: fx.Node | None) -> str:
    """A graph input as Dynamo spells it ("L['x']"), "" where it does not say."""
    source = getattr(placeholder, "_dynamo_source", None) or (
        placeholder.meta.get(SOURCE) if placeholder is not None else None
    )
    if source is None:
        return ""
    return _compat.source_name(source)
