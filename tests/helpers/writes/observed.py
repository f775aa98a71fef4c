"""What calls of torch's functions really write: every tensor argument's bytes, shape, strides, storage and version, before and after.

Schemas and names are not asked, for some lie. Each call is also what Dynamo would put in its graph, a node, and so a question to
`written_by`.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten_with_path, tree_map_only

from te_dynamo.passes.torch_ir.match.writes import written_by


@dataclasses.dataclass
class Seen:
    """What was seen of one function: how many calls, and in how many of them each argument was written, was named by `written_by`, or was
    written and not named."""

    calls: int = 0
    written: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    named: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    missed: dict[str, str] = dataclasses.field(default_factory=dict)
    """By argument, the first such call."""
    idle: dict[str, str] = dataclasses.field(default_factory=dict)
    """By argument, the first call in which it was named and not written."""


class Observed(dict[str, Seen]):
    """By function, what was seen."""

    def run(self, kind: str, target: Any, args: Any, kwargs: Any) -> Any:
        """Runs a call; it is observed where it is torch's, and all calls of torch's functions that it makes are."""

        def inside() -> Any:
            with _Functions(self):
                return (
                    getattr(args[0], target)(*args[1:], **kwargs) if kind == "call_method" else target(*args, **kwargs)
                )

        wrapped = getattr(target, "__module__", "").startswith("torch.testing") or not hasattr(target, "__name__")
        wrapped = wrapped or target.__name__ == "<lambda>"
        return inside() if wrapped and kind == "call_function" else self.call(kind, target, args, kwargs, inside)

    def call(self, kind: str, target: Any, args: Any, kwargs: Any, run: Callable[[], Any]) -> Any:
        """Runs a call, and compares what it writes with what `written_by` says of its node."""
        found = {name: t for name, t in _tensors(target, args, kwargs) if _plain(t)}
        with torch._C.DisableTorchFunction():
            named = _named(kind, target, args, kwargs)
            states = {id(t): _State(t) for t in found.values()}
        result = run()
        seen = self.setdefault(spelled(kind, target), Seen())
        seen.calls += 1
        with torch._C.DisableTorchFunction():
            changed = {key: state.changed() for key, state in states.items()}
        memory = {pointer for key in named if key in states for pointer in states[key].pointer}
        for name, t in found.items():
            state = states[id(t)]
            if id(t) in named:
                seen.named[name] += 1
            if changed[id(t)]:
                seen.written[name] += 1
                if id(t) not in named and not state.pointer & memory:
                    seen.missed.setdefault(name, f"{changed[id(t)]}: {_text(args, kwargs)}")
            elif id(t) in named:
                seen.idle.setdefault(name, _text(args, kwargs))
        return result


def _tensors(target: Any, args: Any, kwargs: Any) -> Iterator[tuple[str, Tensor]]:
    """Each tensor argument, by its place or name; all of a list have one."""
    for path, leaf in tree_flatten_with_path((args, kwargs))[0]:
        if isinstance(leaf, Tensor):
            yield str(getattr(path[1], "key", getattr(path[1], "idx", ""))), leaf


def _plain(t: Tensor) -> bool:
    return type(t) in (Tensor, torch.nn.Parameter) and t.layout == torch.strided and t.device.type == "cpu"


class _State:
    """A tensor as it was, and whether it is no longer so."""

    def __init__(self, t: Tensor) -> None:
        self.tensor, self.described = t, _described(t)
        self.bytes = _bytes(t).clone()
        self.pointer = {t.untyped_storage().data_ptr()} - {0} or {id(t)}

    def changed(self) -> str:
        now = _described(self.tensor)
        if changes := [f"{k} {v} -> {now[k]}" for k, v in self.described.items() if v != now[k]]:
            return ", ".join(changes)
        return "" if torch.equal(self.bytes, _bytes(self.tensor)) else "bytes"


def _described(t: Tensor) -> dict[str, Any]:
    return {
        "shape": tuple(t.shape), "stride": t.stride(), "offset": t.storage_offset(), "version": t._version,
        "storage": t.untyped_storage()._cdata, "memory": t.data_ptr(), "nbytes": t.untyped_storage().nbytes(),
        "requires_grad": t.requires_grad, "leaf": t.is_leaf,
    }  # fmt: skip


def _bytes(t: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(t.untyped_storage())


def _named(kind: str, target: Any, args: Any, kwargs: Any) -> set[int]:
    """The tensors, by id, that `written_by` names for the node of this call."""
    graph = fx.Graph()
    inputs: dict[int, fx.Node] = {}

    def placeholder(t: Tensor) -> fx.Node:
        if id(t) not in inputs:
            inputs[id(t)] = graph.placeholder(f"x{len(inputs)}")
            inputs[id(t)].meta["example_value"] = t
        return inputs[id(t)]

    node_args, node_kwargs = tree_map_only(Tensor, placeholder, (tuple(args), dict(kwargs)))
    written = written_by(graph.create_node(kind, target, node_args, node_kwargs, name="call"))
    return {key for key, node in inputs.items() if node in written}


def spelled(kind: str, target: Any) -> str:
    if kind == "call_method":
        return f"Tensor.{target}"
    if isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return f"torch.ops.{target}" + (" (packet)" if isinstance(target, torch._ops.OpOverloadPacket) else "")
    module = getattr(target, "__module__", None) or ""
    return (resolve_name(target) if module.startswith("torch") or not module else None) or f"{module}.{target.__name__}"


def _text(args: Any, kwargs: Any) -> str:
    def short(t: Tensor) -> str:
        return f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}"

    return str(tree_map_only(Tensor, short, (tuple(args), dict(kwargs))))[:200]


class _Functions(TorchFunctionMode):
    """Inside, each call of torch's functions and of tensors' methods is observed, as Dynamo would see it."""

    def __init__(self, observed: Observed) -> None:
        super().__init__()
        self.observed = observed

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")

        def run() -> Any:
            with _Operations(self.observed):
                return func(*args, **kwargs)

        if name in ("__get__", "__set__", "__delete__") or isinstance(func, torch._ops.OpOverload):
            return run()
        method = getattr(torch.Tensor, name, None) is func
        return self.observed.call(
            "call_method" if method else "call_function", name if method else func, args, kwargs, run
        )


class _Operations(TorchDispatchMode):
    """Inside, each operation is observed: as overload, and as the packet that a model may call."""

    def __init__(self, observed: Observed) -> None:
        super().__init__()
        self.observed = observed

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}

        def overload() -> Any:
            return self.observed.call("call_function", func, args, kwargs, lambda: func(*args, **kwargs))

        return self.observed.call("call_function", func.overloadpacket, args, kwargs, overload)
