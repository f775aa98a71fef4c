"""Where in the user's model a node comes from: the module's path and the source line."""

from __future__ import annotations

import os
import re

import torch
from torch import fx

__all__ = ["module_path", "source_line"]

_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_ROOT = re.compile(r"^[LG]\[(['\"]).*?\1\](\.__closure__\[\d+\]\.cell_contents)?")
_INDEX = re.compile(r"\[['\"]?([^\]'\"]*)['\"]?\]")
_WRAPPERS = {
    "_modules", "_parameters", "_buffers",  # where nn.Module keeps them
    "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module",  # wrappers around the user's module
    "__self__", "forward",  # a compiled bound method
}  # fmt: skip


def module_path(node: fx.Node, weight: fx.Node | None = None) -> str:
    """The path of the module whose forward made the node, as `named_modules` spells it
    ("layers.0.mlp.down_proj"); without one the path of the weight's owner; "" for the model itself and where
    the graph says nothing."""
    stack = node.meta.get("nn_module_stack")
    if stack:
        return _clean(next(reversed(stack.values()))[0])
    source = getattr(weight, "_dynamo_source", None)
    if source is None:
        return ""
    name = source.name() if callable(source.name) else source.name  # a method up to torch 2.11, a property after
    return _clean(name).rpartition(".")[0]


def source_line(node: fx.Node) -> str:
    """ "folder/file.py:17", the innermost frame outside torch itself; "" where unknown."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    if not frames:
        return ""
    users = [frame for frame in frames if not os.path.abspath(frame[0]).startswith(_TORCH)]
    path, line = (users or frames)[-1]
    return f"{'/'.join(path.replace(os.sep, '/').split('/')[-2:])}:{line}"


def _clean(name: str) -> str:
    """A name in Dynamo's spelling ("L['self']._modules['layers']._modules['0']") as a module path
    ("layers.0")."""
    name = _INDEX.sub(r".\1", _ROOT.sub("", name))
    parts = [part.partition("@")[0] for part in name.split(".")]  # "fc@1" is fc's second call
    return ".".join(part for part in parts if part and part not in _WRAPPERS)
