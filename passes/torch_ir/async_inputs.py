"""Inputs whose collective may still run: the graph is compiled for plain tensors in their place, and called with them.

    before    compiled(x)                  x: an AsyncCollectiveTensor, or a DTensor (or another wrapper) of one
    after     compiled(_Wait.apply(x))     its values, once they are there

A functional collective, and so a DTensor's redistribution, gives an AsyncCollectiveTensor, which waits where it is first read. A
block that is compiled by itself has it as an input if a parallel embedding stands before. AOTAutograd takes its inner tensor,
which requires no gradient: what lies before the block would get none. Inside a DTensor nobody waits where Inductor's code reads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_map_only

from te_dynamo.errors import UnsupportedError
from te_dynamo.passes.torch_ir.match.where import source_name


def plain_examples(gm: GraphModule, example_inputs: Sequence[Any]) -> tuple[Sequence[Any], dict[int, str]]:
    """(the example inputs with plain tensors in place of those whose collective may still run, the names of these by position).

    The plain tensors are made of Dynamo's fake ones, whose sizes may be symbols. All example values of the graph change with them.
    """
    placeholders = gm.graph.find_nodes(op="placeholder")
    values = [placeholder.meta.get("example_value") for placeholder in placeholders]
    names = {i: source_name(placeholders[i]) for i, value in enumerate(values) if _is_asynchronous(value)}
    if not names:
        return example_inputs, names
    for body in gm.modules():
        for node in body.graph.nodes if isinstance(body, GraphModule) else ():
            if "example_value" in node.meta:
                node.meta["example_value"] = tree_map_only(torch.Tensor, _plain_example, node.meta["example_value"])
    examples = [placeholders[i].meta["example_value"] if i in names else x for i, x in enumerate(example_inputs)]
    return examples, names


def _plain_example(value: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return _waited(value).requires_grad_(value.requires_grad) if _is_asynchronous(value) else value


class WaitsForInputs:
    """Calls a compiled graph with plain tensors, which have their values, in place of some of its inputs.

    names: of these inputs, by position.
    """

    def __init__(self, compiled: Callable[..., Any], names: Mapping[int, str]) -> None:
        self._compiled, self._names = compiled, names

    def __call__(self, *args: Any) -> Any:
        """Raises UnsupportedError if the graph has written to one of them that requires a gradient: the history of what the caller has would
        not show it."""
        inputs = list(args)
        for position in self._names:
            inputs[position] = _Wait.apply(args[position])
        versions = {p: inputs[p]._version for p in self._names if inputs[p].requires_grad}
        result = self._compiled(*inputs)
        for position, version in versions.items():
            if inputs[position]._version != version:
                raise UnsupportedError(
                    f"te_dynamo: the compiled code writes to its input {self._names[position]}, the result of a collective that has not "
                    "been waited for (an AsyncCollectiveTensor): gradients would be those from before the write. Write to a copy "
                    "(x = x.clone()), or compile the model as a whole, with the collective in it"
                )
        return result


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return _waited(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad


def _waited(x: Any) -> Any:
    """A tensor on the same memory, at every depth without a collective that may still run."""
    if _is_collective(x):
        x.trigger_wait()
        return x.elem.detach()  # the tensor inside itself must not get a history
    if not _is_asynchronous(x):
        return x
    names, context = x.__tensor_flatten__()
    inner = {name: _waited(getattr(x, name)) for name in names}
    return type(x).__tensor_unflatten__(inner, context, x.size(), x.stride())


def _is_asynchronous(value: Any) -> bool:
    """Whether a value is, or has in it, the result of a collective that may still run."""
    if not is_traceable_wrapper_subclass(value):
        return False
    return _is_collective(value) or any(
        _is_asynchronous(getattr(value, name)) for name in value.__tensor_flatten__()[0]
    )


def _is_collective(value: Any) -> bool:
    if not torch.distributed.is_available():
        return False
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    return isinstance(value, AsyncCollectiveTensor)
