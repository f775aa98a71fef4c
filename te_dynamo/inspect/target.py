"""The model that a user gives to `explain`, `compare` or `set_recipe`: what it wraps, and how it is run and left as it was."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from te_dynamo.options import UNSET, Options

_REGISTRIES = [name for name, value in vars(nn.Module()).items() if isinstance(value, dict)]
"""What a module keeps its parameters, buffers, children and hooks in."""


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
def not_in_place(target: Any) -> Iterator[bool]:
    """Sets aside what `model.compile()` left in a module: that code would answer the call, and no pass would run. Gives whether it left any."""
    compiled = target.__dict__.pop("_compiled_call_impl", None) if isinstance(target, nn.Module) else None
    try:
        yield compiled is not None
    finally:
        if compiled is not None:
            target._compiled_call_impl = compiled


def compiled_afresh(target: Any, in_place: bool, **given: Any) -> Callable[..., Any]:
    """What torch.compile makes of it; in place where it was compiled so: torch compiles no forward of its own classes then."""
    if not in_place:
        return torch.compile(target, **given)
    nn.Module.compile(target, **given)
    return target  # type: ignore[no-any-return]


@contextlib.contextmanager
def held_as_before(target: Any) -> Iterator[None]:
    """Puts back what its modules hold: a model may decompress, offload or wrap its parameters when it is first called, and keep tensors of a
    call. Not of a module that has become one of another class, as a lazy one does."""
    modules = list(target.modules()) if isinstance(target, nn.Module) else []
    held = [(module, type(module), list(_contents(module))) for module in modules]
    try:
        yield
    finally:
        for module, cls, contents in held:
            for owner, before in contents if type(module) is cls else ():
                if owner.keys() != before.keys() or any(owner[key] is not before[key] for key in before):
                    owner.clear()
                    owner.update(before)


def _contents(module: nn.Module) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """(a dictionary, what is in it) of the attributes and registries, and of a registry of a library's own class the dictionaries in that."""
    own = vars(module)
    yield own, dict(own)
    for registry in [own[name] for name in _REGISTRIES if name in own]:
        inside = [registry] if isinstance(registry, dict) else vars(registry).values()
        yield from ((each, dict(each)) for each in inside if isinstance(each, dict))


def exchange_tensors(module: nn.Module, other: Callable[[Tensor], Tensor]) -> None:
    """Puts others in the place of a module's own tensors, in registries of its own: one that a library has made may move what is put there."""
    own = vars(module)
    for name in ("_parameters", "_buffers"):
        held = own[name].items()
        own[name] = {key: other(value) if isinstance(value, Tensor) else value for key, value in held}
    own.update({name: other(value) for name, value in own.items() if isinstance(value, Tensor)})


@contextlib.contextmanager
def unchanged(target: Any, args: Any, kwargs: Any) -> Iterator[None]:
    """Puts back the random state, what the modules hold, and every buffer and input that the run writes to."""
    modules = list(target.modules()) if isinstance(target, nn.Module) else []
    buffers = [(module, dict(module._buffers.items())) for module in modules]
    copies = {
        id(b): (b, _version(b), b.detach().clone())
        for _, named in buffers
        for b in named.values()
        if b is not None and not is_lazy(b)
    }
    given = [(x, _version(x), x.detach().clone()) for x in tensors_in((args, kwargs)) if type(x) is Tensor]
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices=devices), held_as_before(target):
        try:
            yield
        finally:
            for module, named in buffers:
                if isinstance(module._buffers, dict):  # not those of a scripted module, which nobody replaces
                    module._buffers.update(named)
            for buffer, version, copy in copies.values():
                if _version(buffer) != version or _differs(buffer, copy):
                    _restore(buffer, copy)
            for x, version, copy in given:
                if _version(x) != version or (version is None and _differs(x, copy)):
                    _restore(x, copy)


def _version(tensor: Tensor) -> int | None:
    """None of one that was made in inference mode."""
    return None if tensor.is_inference() else tensor._version


def _restore(tensor: Tensor, values: Tensor) -> None:
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        tensor.copy_(values)


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
