"""Which tensors a node writes: known, not guessed. What is not known to leave its arguments alone writes all of them.

    operations, and packets of them                        by their schemas
    higher-order operations                                by their bodies
    torch's functions and methods                          by the schema that aten has for the name, and by the name: an underscore
                                                           behind it, an augmented assignment, inplace=True, out=
    functions whose schema or name does not say it         the table _HIDDEN
    any other callable                                     everything that it is given

A custom operation whose schema lies is not ours to see. tests/passes/torch_ir/test_writes_sweep.py runs torch's functions and compares.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from te_dynamo._compat import REDISTRIBUTE, SAME_SHARDS
from te_dynamo.passes.torch_ir.match.memory import Memory, memory_of, share
from te_dynamo.passes.torch_ir.match.values import name_of
from te_dynamo.passes.torch_ir.regions import bodies_of, has_operands

_AUGMENTED = {
    operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv, operator.imod,
    operator.ipow, operator.imatmul, operator.iand, operator.ior, operator.ixor, operator.ilshift,
    operator.irshift, operator.iconcat, operator.setitem, operator.delitem,
}  # fmt: skip
_AUGMENTED_METHODS = {f"__{f.__name__}__" for f in _AUGMENTED}

_STATISTICS = ("running_mean", "running_var")
_HIDDEN: dict[str, tuple[str, tuple[str, ...]]] = {
    "batch_norm": ("training", _STATISTICS),
    "instance_norm": ("use_input_stats", _STATISTICS),
    "native_batch_norm": ("training", _STATISTICS),
    "_batch_norm_impl_index": ("training", _STATISTICS),
    "cudnn_batch_norm": ("training", _STATISTICS),
    "miopen_batch_norm": ("training", _STATISTICS),
    "embedding": ("max_norm", ("weight",)),
    "embedding_bag": ("max_norm", ("weight", "input")),  # it takes weight and indices in either order
    "rrelu_with_noise": ("training", ("noise",)),
    "module_load": ("", ("self",)),
    "fused_moving_avg_obs_fake_quant": ("", ("running_min", "running_max", "scale", "zero_point")),
}
"""Name -> (the argument without which nothing is written, "" for none; what is written)."""

_FORMS = {"resize_", "swapaxes_", "swapdims_", "resize_as_sparse_"}
"""What changes a tensor's size, strides or storage without torch's tag for it."""


def written_by(node: fx.Node) -> list[fx.Node]:
    """The nodes whose tensors this node may write to."""
    target = node.target
    if node.op not in ("call_function", "call_method", "call_module"):
        return []
    if isinstance(target, torch._ops.HigherOrderOperator):
        return _written_by_body(node)
    if not is_known(node):
        return _tensors(node.all_input_nodes)
    written = [node.kwargs.get("out")]
    if _writes_first_argument(node):
        written += [node.args[0]] if node.args else list(_named(node).values())[:1]
    for op in _overloads(node):
        given = _by_schema(node, op) if _takes(op, node) else {}
        written += [given.get(a.name) for a in op._schema.arguments if _is_written(a, given.get(a.name))]
    return [*dict.fromkeys(n for value in (*written, *_hidden(node)) for n in _nodes(value))]


def changes_form(node: fx.Node) -> bool:
    """Whether it changes the size, the strides or the storage of what it writes: its fake value is the one after that, and says nothing
    of what came before."""
    return name_of(node) in _FORMS or any(torch.Tag.inplace_view in op.tags for op in _overloads(node))


# --- who is known


def is_known(node: fx.Node) -> bool:
    """Whether the callable is torch's or ours, or one of Python's operators, and runs no function that it is given."""
    target = node.target
    if node.op == "call_module" or any(
        n.op == "get_attr" and "example_value" not in n.meta for n in node.all_input_nodes
    ):
        return False
    if isinstance(target, (str, torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return True
    home = _home(target)
    if home.startswith(
        "torch._dynamo"
    ):  # what it makes of methods of DTensors, of numpy, of functions that it does not look into
        return getattr(target, "__name__", "") in {*REDISTRIBUTE, *SAME_SHARDS}
    return home.partition(".")[0] in ("torch", "te_dynamo", "_operator", "math", "builtins") and not home.startswith(
        ("torch.distributed", "torch._higher_order_ops")
    )


def _home(target: Any) -> str:
    """The module of a function, a builtin or a method of a class."""
    home: str | None = getattr(target, "__module__", None) or getattr(
        getattr(target, "__objclass__", None), "__module__", None
    )
    return home or str(getattr(getattr(target, "__self__", None), "__name__", ""))


# --- what the known ones write


def _overloads(node: fx.Node) -> tuple[torch._ops.OpOverload, ...]:
    """The operations that a node may run: of a torch function or method those that aten has under its name."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return (target,)
    return _of_packet(target) if isinstance(target, torch._ops.OpOverloadPacket) else _of_name(name_of(node))


@functools.cache
def _of_packet(packet: torch._ops.OpOverloadPacket) -> tuple[torch._ops.OpOverload, ...]:
    return tuple(getattr(packet, name) for name in packet.overloads())


@functools.cache
def _of_name(name: str) -> tuple[torch._ops.OpOverload, ...]:
    packet = getattr(torch.ops.aten, name, None)
    return _of_packet(packet) if isinstance(packet, torch._ops.OpOverloadPacket) else ()


def _writes_first_argument(node: fx.Node) -> bool:
    name = name_of(node)
    if isinstance(node.target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return False  # a schema says it
    if node.target in (operator.and_, operator.or_):  # keywords of Python
        return False
    if node.target in _AUGMENTED or (node.op == "call_method" and name in _AUGMENTED_METHODS):
        return True
    return (name.endswith("_") and not name.endswith("__")) or (
        True in [a for a in (*node.args, *node.kwargs.values()) if isinstance(a, bool)]
        and _named(node).get("inplace") is True
    )


def _hidden(node: fx.Node) -> list[Any]:
    """The arguments of `_HIDDEN` that this call writes."""
    flag, names = _HIDDEN.get(name_of(node), ("", ()))
    given = _named(node) if names else {}
    written = not flag or given.get(flag) not in (None, False)
    return [given.get(name) for name in names if name != "input" or _is_floating(given.get(name))] if written else []


def _is_floating(node: Any) -> bool:
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return not isinstance(value, torch.Tensor) or value.is_floating_point()


def _named(node: fx.Node) -> dict[str, Any]:
    """A call's arguments by their names, as far as somebody knows these."""
    function: Any = node.target if node.op != "call_method" else getattr(torch.Tensor, str(node.target), None)
    if inspect.isfunction(function):
        try:
            bound = inspect.signature(function).bind(*node.args, **node.kwargs)
        except TypeError:
            return dict(node.kwargs)
        bound.apply_defaults()
        return dict(bound.arguments)
    overloads = _overloads(node)  # a builtin has no signature
    return _by_schema(node, overloads[0]) if overloads else dict(node.kwargs)


def _by_schema(node: fx.Node, op: torch._ops.OpOverload) -> dict[str, Any]:
    """The call's arguments by the names of that operation's."""
    return {**dict(zip((a.name for a in op._schema.arguments), node.args, strict=False)), **node.kwargs}


def _takes(op: torch._ops.OpOverload, node: fx.Node) -> bool:
    """Whether it is one of the operations that the call may mean."""
    by_position = [argument for argument in op._schema.arguments if not argument.kwarg_only]
    return len(node.args) <= len(by_position) and {*node.kwargs} <= {argument.name for argument in op._schema.arguments}


def _is_written(argument: Any, given: Any) -> bool:
    """Of a schema's arguments; packets also hold TorchScript's functions of lists."""
    if argument.alias_info is None or not argument.alias_info.is_write or "Tensor" not in str(argument.type):
        return False
    return isinstance(given, (list, tuple)) == isinstance(argument.type, torch.ListType)


def _written_by_body(node: fx.Node) -> list[fx.Node]:
    """A higher-order operation writes the operands that its body writes; one without a body in the graph may write anything that it is
    given."""
    bodies = bodies_of(node.graph.owning_module, node)
    written = [memory for body in bodies for memory in _written_from_outside(body)]
    if bodies and not written:
        return []
    if not has_operands(node, bodies):
        return _tensors(node.all_input_nodes)
    placeholders = bodies[0].graph.find_nodes(op="placeholder")
    pairs = zip(placeholders, node.args[-len(placeholders) :], strict=True)
    return [n for p, n in pairs if isinstance(n, fx.Node) and any(share(memory_of(p), memory) for memory in written)]


def _written_from_outside(body: fx.GraphModule) -> Iterator[Memory]:
    """The memory of what is written in a body and was not made there."""
    nodes = body.graph.nodes
    outside = [
        memory_of(n) for n in nodes if n.op == "placeholder" or (n.op == "get_attr" and "example_value" in n.meta)
    ]
    for memory in (memory_of(w) for n in nodes for w in written_by(n)):
        if any(share(memory, of) for of in outside):
            yield memory


def _tensors(nodes: list[fx.Node]) -> list[fx.Node]:
    return [node for node in nodes if memory_of(node)]


def _nodes(value: Any) -> Iterator[fx.Node]:
    if isinstance(value, fx.Node):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _nodes(item)
