"""The model that a user gives to `explain`, `compare` or `set_recipe`: what it wraps, and how it is run and left as it was."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from te_dynamo.options import UNSET, Options

__all__ = ["holder_of", "not_in_place", "options_and_mode", "tensors_in", "unchanged", "unwrap"]


def unwrap(model: Any) -> tuple[Callable[..., Any], dict[str, Any]]:
    """(what a compiled model wraps, the options and mode it was compiled with as far as torch tells)"""
    holder = holder_of(model)
    given = getattr(holder and holder._torchdynamo_orig_backend, "kwargs", {})
    if isinstance(model, torch._dynamo.eval_frame.OptimizedModule):
        return model._orig_mod, given
    return getattr(model, "_torchdynamo_orig_callable", model), given


def holder_of(model: Any) -> Any:
    """The innermost of torch's wrappers around the backend of a compiled model or function: Dynamo asks the backend that it finds there, and
    runs no code that another backend has compiled. None where nothing is compiled."""
    layer = _callback_of(model)
    while hasattr(inner := getattr(layer, "_torchdynamo_orig_backend", None), "_torchdynamo_orig_backend"):
        layer = inner
    return layer if inner is not None else None


def _callback_of(model: Any) -> Any:
    if isinstance(model, torch._dynamo.eval_frame.OptimizedModule):
        return getattr(model.dynamo_ctx, "callback", None)
    compiled = (
        getattr(model, "_compiled_call_impl", None) or model
    )  # of a module that `model.compile()` compiled in place
    while inspect.isfunction(compiled) and hasattr(compiled, "_torchdynamo_orig_callable"):
        held = inspect.getclosurevars(compiled).nonlocals
        if "callback" in held:
            return held["callback"]
        compiled = getattr(compiled, "__wrapped__", None)  # a function that `require_coverage` wraps
    return None


@contextlib.contextmanager
def not_in_place(target: Any) -> Iterator[None]:
    """Sets aside what `model.compile()` left in a module: that code would answer the call, and no pass would run."""
    compiled = target.__dict__.pop("_compiled_call_impl", None) if isinstance(target, nn.Module) else None
    try:
        yield
    finally:
        if compiled is not None:
            target._compiled_call_impl = compiled


@contextlib.contextmanager
def unchanged(target: Any, args: Any, kwargs: Any) -> Iterator[None]:
    """Puts back the random state and every buffer that the run writes to or replaces."""
    modules = list(target.modules()) if isinstance(target, nn.Module) else []
    buffers = [(module, dict(module._buffers.items())) for module in modules]
    copies = {
        id(b): (b, b._version, b.detach().clone()) for _, named in buffers for b in named.values() if b is not None
    }
    devices = {tensor.device.index for tensor in tensors_in((args, kwargs)) if tensor.is_cuda}
    with torch.random.fork_rng(devices=sorted(index for index in devices if index is not None)):
        try:
            yield
        finally:
            for module, named in buffers:
                if isinstance(module._buffers, dict):  # not those of a scripted module, which nobody replaces
                    module._buffers.update(named)
            with torch.no_grad():
                for buffer, version, copy in copies.values():
                    if buffer._version != version or _differs(buffer, copy):
                        buffer.copy_(copy)


def _differs(buffer: Tensor, copy: Tensor) -> bool:
    """Of a write that no version shows: batch_norm's to its statistics, without AOTAutograd."""
    plain = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
    return buffer.dtype in plain and buffer.device.type in ("cpu", "cuda") and not torch.equal(buffer, copy)


def tensors_in(tree: Any) -> list[Tensor]:
    """The tensors in arguments or results."""
    return [leaf for leaf in torch.utils._pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def options_and_mode(
    own: Mapping[str, Any],
    options: Mapping[str, Any] | None,
    mode: str | None,
    recipe: Any = UNSET,
    rules: Any = UNSET,
) -> dict[str, Any]:
    """The options that `explain` and `compare` compile with, those of a mode among them: torch.compile takes one of the two.

    own: what the model was compiled with. It holds where neither options nor a mode are given. A recipe and rules go before options.
    """
    if options is None and mode is None:
        options, mode = own.get("options"), own.get("mode")
    chosen = {name: value for name, value in (("recipe", recipe), ("rules", rules)) if value is not UNSET}
    expanded = dict(Options.parse(None, mode).inductor) if mode is not None else {}
    return {**expanded, **(options or {}), **chosen}
