"""A call in Torch IR -> the calls that a Python function makes for it, recorded as Dynamo would have traced them.

    y = torch.nn.functional.multi_head_attention_forward(...)[0]    ->    linear = torch._C._nn.linear(query, in_proj_weight, ...)
                                                                          chunk = ...
The function runs once, on the fake tensors of the call's arguments; a mode sees each torch function that it calls. So what is put in
is what torch's own code computes for these arguments, whatever they are.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from te_dynamo.passes.torch_ir.match.autocast import autocast_around
from te_dynamo.passes.torch_ir.match.memory import note_new
from te_dynamo.passes.torch_ir.match.values import emit, emit_method, replace
from te_dynamo.passes.torch_ir.match.writes import written_by

_PLAIN = (bool, int, float, str, type(None), torch.SymInt, torch.SymBool, torch.dtype, torch.device, torch.layout)
"""What a torch function may return beside tensors: values that the recorded calls hold as they are."""


class CannotInline(Exception):
    """Why a call stays what it is."""


def inline_call(node: fx.Node, function: Callable[..., Any]) -> list[fx.Node]:
    """Replaces `node`, which gives a tensor or a tuple of them, by the torch calls of `function` with its arguments; the new nodes.

    Raises CannotInline, with the graph as it was.
    """
    graph, last = node.graph, node.prev
    try:
        with graph.inserting_before(node):
            result = _record(node, function)
        _check(node, result)
    except Exception as error:
        for new in reversed(_between(last, node)):
            graph.erase_node(new)
        if isinstance(error, CannotInline):
            raise
        raise CannotInline(f"{type(error).__name__} while tracing it: {str(error).partition(chr(10))[0]}") from error
    added = _between(last, node)
    _take_over(node, result)
    for new in reversed(added):
        if not new.users:
            graph.erase_node(new)
    return [new for new in added if not new._erased]


def _between(first: fx.Node, last: fx.Node) -> list[fx.Node]:
    """The nodes behind `first` and before `last`, in order."""
    found, node = [], first.next
    while node is not last:
        found.append(node)
        node = node.next
    return found


def _record(node: fx.Node, function: Callable[..., Any]) -> Any:
    """The function's result with nodes in place of tensors."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), _example)
    outputs = [v for v in tree_leaves(node.meta["example_value"]) if isinstance(v, torch.Tensor)]
    modes = [v.fake_mode for v in tree_leaves((args, kwargs)) if isinstance(v, FakeTensor)]
    recorder = _Recorder(node)
    with contextlib.ExitStack() as stack:
        stack.enter_context(modes[0] if modes else contextlib.nullcontext())
        stack.enter_context(enable_python_dispatcher())  # as Dynamo does: else sizes that change would be fixed
        stack.enter_context(torch.set_grad_enabled(any(v.requires_grad for v in outputs)))
        stack.enter_context(autocast_around(node))
        stack.enter_context(recorder)
        result = function(*args, **kwargs)
    return tree_map(recorder.argument, result)


def _example(node: fx.Node) -> Any:
    """What the call got. A float that torch.compile(dynamic=True) made an input is fixed: Dynamo traces anew with the number."""
    value = node.meta["example_value"]
    return float(value) if isinstance(value, torch.SymFloat) else value


def _check(node: fx.Node, result: Any) -> None:
    """Raises unless `result` has what the readers of `node` read, in the shapes and dtypes that Dynamo found."""
    if isinstance(result, fx.Node):
        pairs = [(result, node)]
    else:
        if any(user.target is not operator.getitem for user in node.users):
            raise CannotInline("it is read as a whole")
        pairs = [(result[user.args[1]], user) for user in node.users]  # type: ignore[index]
    for recorded, read in pairs:
        found = recorded.meta["example_value"] if isinstance(recorded, fx.Node) else None
        wanted = read.meta["example_value"]
        if found is None or found.shape != wanted.shape or found.dtype != wanted.dtype:
            described = [None if v is None else f"{v.dtype}{list(v.shape)}" for v in (found, wanted)]
            raise CannotInline(f"traced, it gives {described[0]} where the model has {described[1]}")


def _take_over(node: fx.Node, result: Any) -> None:
    if isinstance(result, fx.Node):
        replace(node, result)
    for item in list(node.users):
        replace(item, result[item.args[1]])
        node.graph.erase_node(item)
    node.graph.erase_node(node)


class _Recorder(TorchFunctionMode):
    """Adds a node at the graph's insert point for each torch function that gives a tensor."""

    def __init__(self, like: fx.Node) -> None:
        super().__init__()
        self._like = like
        self._nodes: dict[int, tuple[fx.Node, torch.Tensor]] = {}  # the tensor too: its id is its name
        self._sizes: dict[Any, tuple[fx.Node, int]] = {}
        for operand in like.all_input_nodes:
            if isinstance(value := operand.meta["example_value"], torch.Tensor):
                self._know(value, operand)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        leaves = tree_leaves(result)
        if any(isinstance(leaf, torch.Tensor) for leaf in leaves):
            self._add(func, args, kwargs, result)
        elif result is None or not all(isinstance(leaf, _PLAIN) for leaf in leaves):
            raise CannotInline(f"it calls {getattr(func, '__name__', func)}, whose result is no tensor")
        return result

    def argument(self, value: Any) -> Any:
        """What a node holds for a value of the function's: nodes for tensors and for sizes that change."""
        if isinstance(value, torch.Tensor):
            if id(value) not in self._nodes:
                raise CannotInline("it reads a tensor that is no argument")
            return self._nodes[id(value)][0]
        if isinstance(value, torch.SymInt):
            return self._size(value.node.expr)
        return value

    def _add(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        graph, name = self._like.graph, getattr(func, "__name__", "")
        args, kwargs = tree_map(self.argument, tuple(args)), tree_map(self.argument, dict(kwargs))
        if name == "__get__":  # x.mT
            node = graph.call_function(getattr, (args[0], func.__self__.__name__))
        elif name == "__getitem__":
            node = graph.call_function(operator.getitem, args, kwargs)
        elif name and getattr(torch.Tensor, name, None) == func:
            node = graph.call_method(name, args, kwargs)
        else:
            node = graph.call_function(func, args, kwargs)
        self._know(result, node)
        if written_by(node):  # the writes of a graph are noted before its calls are inlined
            raise CannotInline(f"its {name} works in place")

    def _know(self, value: Any, node: fx.Node) -> None:
        if node not in self._like.all_input_nodes:
            node.meta = {**self._like.meta, "example_value": value}
            note_new(node)
        if not isinstance(value, torch.Tensor):
            for index, part in enumerate(value):
                self._know(part, node.graph.call_function(operator.getitem, (node, index)))
            return
        self._nodes[id(value)] = node, value
        for dim, size in enumerate(value.shape):
            if isinstance(size, torch.SymInt):
                self._sizes.setdefault(size.node.expr, (node, dim))

    def _size(self, expr: Any) -> Any:
        if expr.is_Integer:
            return int(expr)
        graph, like = self._like.graph, self._like
        if expr in self._sizes:
            return emit_method(graph, "size", self._sizes[expr], like)
        combine = operator.mul if expr.is_Mul else operator.add if expr.is_Add else None
        if combine is None:
            raise CannotInline(f"its shapes depend on {expr}")
        return reduce(lambda a, b: emit(graph, combine, (a, b), like), map(self._size, expr.args))
