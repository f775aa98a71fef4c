"""Whether something between two nodes of a graph writes a tensor, or changes what a rewritten node would
mean.

A match of several nodes becomes one node, at the place of the last. That reads its inputs later than the user
did, and may keep them for the backward pass where the user's formula kept a copy. Torch IR has in-place
methods, augmented assignments and `out=`, so both need proof.
"""

from __future__ import annotations

import contextlib
import contextvars
import inspect
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch.multiprocessing.reductions import StorageWeakRef

from te_dynamo.passes.torch_ir.match.values import tensor_of

__all__ = ["effects_known", "refuses", "written_by"]

_AUGMENTED = {
    operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv, operator.imod,
    operator.ipow, operator.imatmul, operator.iand, operator.ior, operator.ixor, operator.ilshift,
    operator.irshift, operator.setitem,
}  # fmt: skip
_AUGMENTED_METHODS = {f"__{f.__name__}__" for f in _AUGMENTED}
_MODES = {
    "_set_grad_enabled", "_enter_autocast", "_exit_autocast", "_enter_inference_mode", "_exit_inference_mode",
    "_saved_tensors_hooks_disable", "_saved_tensors_hooks_enable",
}  # fmt: skip


def refuses(nodes: Sequence[fx.Node]) -> str:
    """Why the nodes of a match must not become one node in the place of the last; "" when they may.

    Refused: a write to a tensor that may share memory with one they read, between the first and the last (or
    anywhere after, when backward will want its value), and a change of grad mode or autocast in between.
    """
    first, last = min(nodes), max(nodes)
    reads = {operand for node in nodes for operand in node.all_input_nodes} - set(nodes)
    result = tensor_of(last)
    keeps = result is None or result.requires_grad
    effects = _known.get()
    for node in _effects(first.graph) if effects is None else effects:
        if node._erased or node < first:
            continue
        inside = not last < node
        if not (inside or keeps):
            break
        if inside and _changes_mode(node):
            return f"{_spelled(node)} changes the mode inside the pattern"
        if any(_may_share_memory(written, read) for written in written_by(node) for read in reads):
            when = "inside the pattern" if inside else "after it, and backward needs its value"
            return f"{_spelled(node)} writes an input in place {when}"
    return ""


@contextlib.contextmanager
def effects_known(graph: fx.Graph) -> Iterator[None]:
    """Inside, `refuses` asks about nodes of `graph`, to which no write and no change of mode is added meanwhile.

    Without it each question reads the whole graph.
    """
    token = _known.set(_effects(graph))
    try:
        yield
    finally:
        _known.reset(token)


_known: contextvars.ContextVar[list[fx.Node] | None] = contextvars.ContextVar("te_dynamo_effects", default=None)


def _effects(graph: fx.Graph) -> list[fx.Node]:
    """The nodes that write to a tensor or change grad mode or autocast, in order."""
    return [node for node in graph.nodes if _changes_mode(node) or written_by(node)]


def _changes_mode(node: fx.Node) -> bool:
    return getattr(node.target, "__name__", "") in _MODES


def written_by(node: fx.Node) -> list[fx.Node]:
    """The nodes whose tensors this node may write to."""
    if node.op == "call_module":
        return node.all_input_nodes
    if node.op not in ("call_function", "call_method"):
        return []
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return _written_by_body(node)
    written = list(_nodes(node.kwargs.get("out")))
    if isinstance(node.target, torch._ops.OpOverload):
        schema = node.target._schema.arguments
        given = {a.name: value for a, value in zip(schema, node.args, strict=False)} | node.kwargs
        written += [n for a in schema if a.alias_info and a.alias_info.is_write for n in _nodes(given.get(a.name))]
    elif _writes_first_argument(node):
        written += _nodes(node.args[0] if node.args else node.kwargs.get("input"))
    return written


def _writes_first_argument(node: fx.Node) -> bool:
    if node.op == "call_method":
        name = str(node.target)
        return name in _AUGMENTED_METHODS or (name.endswith("_") and not name.endswith("__"))
    if node.target in _AUGMENTED or node.kwargs.get("inplace") is True:
        return True
    name = getattr(node.target, "__name__", "")
    return (name.endswith("_") and not name.endswith("__")) or _inplace_by_position(node)


def _inplace_by_position(node: fx.Node) -> bool:
    """`F.relu(x, True)`: the flag named inplace, passed without its name."""
    if True not in [a for a in node.args if isinstance(a, bool)]:
        return False
    try:
        bound = inspect.signature(node.target).bind(*node.args, **node.kwargs)  # type: ignore[arg-type]
    except (TypeError, ValueError):  # builtins have no signature, and no flag named inplace
        return False
    return bound.arguments.get("inplace") is True


def _written_by_body(node: fx.Node) -> list[fx.Node]:
    """A higher-order op writes what its body writes; one without a body in the graph may write anything it is
    given."""
    owner = node.graph.owning_module
    bodies: list[Any] = [getattr(owner, str(n.target), None) for n in node.all_input_nodes if n.op == "get_attr"]
    bodies = [b for b in bodies if isinstance(b, fx.GraphModule)]
    if bodies and not any(written_by(n) for body in bodies for n in body.graph.nodes):
        return []
    return [n for n in node.all_input_nodes if tensor_of(n) is not None]


def _may_share_memory(a: fx.Node, b: fx.Node) -> bool:
    """Dynamo's fake tensors share a storage exactly where the real ones do; what cannot be told is taken for
    shared."""
    x, y = tensor_of(a), tensor_of(b)
    if a is b or x is None or y is None:
        return True
    try:
        return StorageWeakRef(x.untyped_storage()) == StorageWeakRef(y.untyped_storage())
    except (RuntimeError, NotImplementedError):
        return True


def _nodes(value: Any) -> Iterator[fx.Node]:
    if isinstance(value, fx.Node):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _nodes(item)


def _spelled(node: fx.Node) -> str:
    target = node.target
    return target if isinstance(target, str) else getattr(target, "__name__", str(target))
