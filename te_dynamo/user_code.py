"""Where in the user's code a graph's node was written: its line, and the path of the module as `named_modules` spells it."""

from __future__ import annotations

import os
import re
from ast import literal_eval
from collections.abc import Iterator
from types import CodeType
from typing import Any

import torch
from torch import fx, nn

OWNERS = "te_dynamo_owners"
"""Key of a placeholder's meta: the paths of the modules in the whole model that hold this parameter (passes/torch_ir/match/root.py)."""

_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_ROOT = re.compile(r"^[LG]\[(['\"]).*?\1\](\.__closure__\[\d+\]\.cell_contents)?")
_GETATTR = re.compile(r"getattr\((.*), (['\"])(.*?)\2\)")
_INDEX = re.compile(r"\[((['\"])(?:\\.|(?!\2).)*\2|[^\]'\"]*)\]")
_AROUND = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
"""How wrappers call the user's module."""

_WRAPPERS = {
    *_AROUND,
    "_modules", "_parameters", "_buffers", "__dict__",  # where nn.Module keeps them
    "__self__", "forward",  # a compiled bound method
}  # fmt: skip


def source_line(node: fx.Node) -> str:
    """ "folder/file.py:17", the innermost frame outside torch itself; "" where unknown."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    if not frames:
        return ""
    users = [frame for frame in frames if not is_torchs(frame[0])]
    path, line = (users or frames)[-1]
    return f"{'/'.join(path.replace(os.sep, '/').split('/')[-2:])}:{line}"


def is_torchs(file: str) -> bool:
    """Whether it is one of torch's own."""
    return os.path.abspath(file).startswith(_TORCH)


def clean_path(name: str) -> str:
    """A name in Dynamo's spelling ("L['self']._modules['layers']._modules['0']") as a module path
    ("layers.0")."""
    while name != (found := _GETATTR.sub(r"\1.\3", name)):  # a name that is no identifier: getattr(L['model'], '0')
        name = found
    name = _INDEX.sub(lambda key: f".{literal_eval(key[1]) if key[2] else key[1]}", _ROOT.sub("", name))
    parts = [part.partition("@")[0] for part in name.split(".")]  # "fc@1" is fc's second call
    return ".".join(part for part in parts if part and part not in _WRAPPERS)


def without_wrappers(path: str) -> str:
    """A path of `named_modules` or `named_parameters` as rules, reports and files spell it."""
    return ".".join(part for part in path.split(".") if part not in _AROUND)


def modules_at(model: Any) -> dict[str, list[nn.Module]]:
    """Path -> the wrappers there, the outermost first, then the module; a shared module is at each of its paths. {} of a function."""
    found: dict[str, list[nn.Module]] = {}
    for path, module in model.named_modules(remove_duplicate=False) if isinstance(model, nn.Module) else ():
        found.setdefault(without_wrappers(path), []).append(module)
    return found


def module_here(node: fx.Node) -> str | None:
    """The module whose forward made the node, as the compiled function spells it; None where the graph does not say."""
    stack = node.meta.get("nn_module_stack")
    return clean_path(next(reversed(stack.values()))[0]) if stack else None


def has_own_path(parameter: str) -> bool:
    """Whether the linear by that parameter has its path ("blocks.0.qkv_w"), not its module's, which stands for `weight`."""
    return (
        bool(parameter) and parameter.rpartition(".")[2] != "weight" and "parametrizations" not in parameter.split(".")
    )


def paths_of(model: nn.Module) -> Iterator[str]:
    """All paths that a rule may name: of what is shared each, of parameters those by which a module may multiply itself."""
    yield from (clean_path(path) for path, _ in model.named_modules(remove_duplicate=False))
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.dim() > 1 and has_own_path(name):
            yield clean_path(name)


def traced_code() -> CodeType | None:
    """The function that Dynamo compiles; None where something else calls the backend."""
    codes = torch._guards.TracingContext.get_traced_code() if torch._guards.TracingContext.try_get() else None
    return codes[0] if codes else None
