"""Where in the whole model a graph's paths begin.

Behind a graph break Dynamo compiles the rest of a function as a function of its own: the paths in its graph begin at the
module, or the variable, that this function was given. Rules name paths of the whole model, so those are found again: the
compiled model is on the Python stack, and its parameters are the graph's inputs, the same objects.

Modules of one class that are reached behind graph breaks (layers in a loop with a break in it, FSDP's blocks) run one graph:
the paths in it are those of the first, and where a rule tells the others from it, its linears are left.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from torch import fx, nn

from te_dynamo.passes.torch_ir.match.where import parameter_name, path_prefix, sharing_prefixes
from te_dynamo.user_code import OWNERS, clean_path

__all__ = ["also_run_at", "compiled_model", "in_whole_model"]


@contextlib.contextmanager
def in_whole_model(graph: fx.Graph, example_inputs: Sequence[Any]) -> Iterator[None]:
    """Inside, `path_prefix` holds for `graph`, `sharing_prefixes` too, and its placeholders know their OWNERS."""
    root = compiled_model()
    paths = {} if root is None else {name: p for name, p in root.named_parameters(remove_duplicate=False)}
    names: dict[int, list[str]] = {}
    for name, parameter in paths.items():
        names.setdefault(id(parameter), []).append(clean_path(name))
    cleaned = list(map(clean_path, paths))
    prefixes, alike = set(), None
    for placeholder, value in zip(graph.find_nodes(op="placeholder"), example_inputs, strict=False):
        local = parameter_name(placeholder)
        for name in names.get(id(value), ()):
            placeholder.meta.setdefault(OWNERS, []).append(name.rpartition(".")[0])
            if local and (name == local or name.endswith("." + local)):
                prefixes.add(name.removesuffix(local))
        if local and isinstance(value, nn.Parameter):
            with_it = {name.removesuffix(local) for name in cleaned if name == local or name.endswith("." + local)}
            alike = with_it if alike is None else alike & with_it
    if not prefixes and alike is not None and len(alike) == 1:
        prefixes = set(alike)  # fake parameters: a graph that is split where DDP's buckets end
    prefix = prefixes.pop() if len(prefixes) == 1 else None
    tokens = path_prefix.set(prefix), sharing_prefixes.set(_of_one_class(root, prefix, alike or set()))
    try:
        yield
    finally:
        path_prefix.reset(tokens[0])
        sharing_prefixes.reset(tokens[1])


def _of_one_class(root: nn.Module | None, prefix: str | None, alike: set[str]) -> tuple[str, ...]:
    """The prefixes of modules that have the same parameters and are of the same class as the one at `prefix`.

    A class of the user's: one of torch's own (nn.Linear) is seldom what Dynamo compiles by itself, and is used everywhere.
    """
    if root is None or not prefix or len(alike) < 2:
        return ()
    classes = {f"{clean_path(path)}.": type(module) for path, module in root.named_modules()}
    if classes.get(prefix, nn.Module).__module__.startswith("torch.nn."):
        return ()
    return tuple(sorted(other for other in alike if classes.get(other) is classes.get(prefix)))


def also_run_at(path: str) -> tuple[str, ...]:
    """The paths that stand for `path` in the other modules that may run this graph."""
    prefix = path_prefix.get() or ""
    return tuple(other + path.removeprefix(prefix) for other in sharing_prefixes.get() if other != prefix)


def compiled_model() -> nn.Module | None:
    """The module that torch.compile was given, of the innermost compiled call on the Python stack.

    Only frames of torch's own call are looked into: up to Python 3.12 a frame whose locals were read keeps them until it returns,
    and a caller's `del model` would free nothing.
    """
    from torch._dynamo.eval_frame import OptimizedModule

    frame = sys._getframe()
    while frame is not None:
        if frame.f_code is nn.Module._wrapped_call_impl.__code__:
            owner = frame.f_locals["self"]
            if isinstance(owner, OptimizedModule):
                return owner._orig_mod
            if owner._compiled_call_impl is not None:
                return owner
        frame = frame.f_back  # type: ignore[assignment]
    return None
