"""Where in the whole model a graph's paths begin.

Behind a graph break Dynamo compiles the rest of a function as a function of its own: the paths in its graph begin at the
module, or the variable, that this function was given. Rules name paths of the whole model, so those are found again: the
compiled model is on the Python stack, and its parameters are the graph's inputs, the same objects.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from torch import fx, nn

from te_dynamo.passes.match.where import OWNERS, clean_path, parameter_name, path_prefix

__all__ = ["in_whole_model"]


@contextlib.contextmanager
def in_whole_model(graph: fx.Graph, example_inputs: Sequence[Any]) -> Iterator[None]:
    """Inside, `path_prefix` holds for `graph`, and its placeholders know their OWNERS."""
    root = _compiled_model()
    names: dict[int, list[str]] = {}
    for name, parameter in root.named_parameters(remove_duplicate=False) if root is not None else ():
        names.setdefault(id(parameter), []).append(clean_path(name))
    prefixes = set()
    for placeholder, value in zip(graph.find_nodes(op="placeholder"), example_inputs, strict=False):
        local = parameter_name(placeholder)
        for name in names.get(id(value), ()):
            placeholder.meta.setdefault(OWNERS, []).append(name.rpartition(".")[0])
            if local and (name == local or name.endswith("." + local)):
                prefixes.add(name.removesuffix(local))
    token = path_prefix.set(prefixes.pop() if len(prefixes) == 1 else None)
    try:
        yield
    finally:
        path_prefix.reset(token)


def _compiled_model() -> nn.Module | None:
    """The module that torch.compile was given, of the innermost compiled call on the Python stack."""
    from torch._dynamo.eval_frame import OptimizedModule

    frame = sys._getframe()
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, OptimizedModule):
            return owner._orig_mod
        if isinstance(owner, nn.Module) and getattr(owner, "_compiled_call_impl", None) is not None:
            return owner
        frame = frame.f_back  # type: ignore[assignment]
    return None
