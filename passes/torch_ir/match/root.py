"""Where in the whole model a graph's paths begin, and which other modules run the same graph.

Behind a graph break Dynamo compiles the rest of a function as a function of its own: the paths in its graph begin at the
module, or the variable, that this function was given. Rules name paths of the whole model, so those are found again: the
compiled model is on the Python stack, and its parameters are the graph's inputs, the same objects.

Modules that run one function (layers in a loop with a break in it, FSDP's blocks) run one graph: the paths in it are those of the
first. Which modules run it, the traced code says: those with a method that holds its lines. They need parameters of the same form, or
Dynamo compiles a graph for each. Where a rule tells the others from the first, Dynamo is made to compile a graph for each of a few; of
more the linears are left.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import sys
from collections.abc import Iterator, Sequence
from types import CodeType, FunctionType
from typing import Any

from torch import fx, nn

from te_dynamo.passes.torch_ir.match.where import parameter_name, path_prefix
from te_dynamo.user_code import OWNERS, clean_path, is_torchs, traced_code


@contextlib.contextmanager
def in_whole_model(graph: fx.Graph, example_inputs: Sequence[Any]) -> Iterator[None]:
    """Inside, `path_prefix` and `also_run_at` hold for `graph`, and its placeholders know their OWNERS."""
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
    twins = dataclasses.replace(
        _twins_of(root, prefix, graph), starts=tuple(sorted(p.removesuffix(".") for p in prefixes))
    )
    token, other = path_prefix.set(prefix), _twins.set(twins)
    try:
        yield
    finally:
        path_prefix.reset(token)
        _twins.reset(other)


_APART = 4
"""Dynamo compiles a function eight times by default; a graph with gradients and one without count apart."""


@dataclasses.dataclass(frozen=True)
class _Twins:
    """Modules that run the graph being matched.

    places: for each that holds the graph's parameters its path, and the paths of the others.
    forms:  what modules and parameters must agree in to stand for one another, by path.
    owned:  the placeholders of parameters.
    starts: where the graph's paths may begin, of modules that the model holds at several paths; () where one is known.
    seldom: whether many could run it, as nn.Linear's own method, which Dynamo seldom compiles by itself.
    """

    places: tuple[tuple[str, tuple[str, ...]], ...] = ()
    forms: dict[str, Any] = dataclasses.field(default_factory=dict)
    owned: tuple[fx.Node, ...] = ()
    seldom: bool = False
    starts: tuple[str, ...] = ()


_twins: contextvars.ContextVar[_Twins] = contextvars.ContextVar("te_dynamo_twins", default=_Twins())  # noqa: B039  nobody writes it


def also_run_at(path: str) -> tuple[str, ...]:
    """The paths that stand for `path` in the other modules that may run this graph."""
    twins, found = _twins.get(), set()
    for place, others in twins.places:
        if path == place or path.startswith(f"{place}."):
            found |= {f"{other}{path[len(place) :]}" for other in others}
    return tuple(sorted(other for other in found if twins.forms.get(other) == twins.forms.get(path)))


def also_named(path: str) -> tuple[str, ...]:
    """The other paths of the same module, where the graph does not tell at which of them it runs."""
    starts = _twins.get().starts
    rests = [path[len(start) :] for start in starts if path == start or path.startswith(f"{start}.")]
    return tuple(other for rest in rests for start in starts if (other := start + rest) != path)


def tell_apart(count: int) -> bool:
    """Has Dynamo compile a graph for each of the `count` modules that may run this one; False where they are too many for that."""
    from torch._dynamo.guards import GuardBuilder, install_guard

    twins = _twins.get()
    if count > _APART and not twins.seldom:
        return False
    for node in twins.owned:
        install_guard(node._dynamo_source.make_guard(GuardBuilder.ID_MATCH))  # type: ignore[attr-defined]
    return True


def _twins_of(root: nn.Module | None, prefix: str | None, graph: fx.Graph) -> _Twins:
    """Of a function that is no module's method: the modules like the one that it was given."""
    modules = {} if root is None else {clean_path(path): m for path, m in root.named_modules(remove_duplicate=False)}
    owned = [node for node in graph.find_nodes(op="placeholder") if node.meta.get(OWNERS)]
    code = traced_code()
    running = [path for path, module in modules.items() if code is not None and _runs(type(module), code)]
    if running:
        owners = [node.meta[OWNERS] for node in owned]
        holding = [path for path in running if all(any(_holds(path, owner) for owner in each) for each in owners)]
    elif own := (prefix or "").removesuffix("."):
        holding, running = [own], [path for path in modules if type(modules[path]) is type(modules.get(own))]
    if root is None or len(running) < 2:
        return _Twins()
    forms: dict[str, Any] = {path: (type(m), *map(_form, m.named_parameters())) for path, m in modules.items()}
    forms |= {clean_path(path): _form(("", p)) for path, p in root.named_parameters(remove_duplicate=False)}
    places = tuple((path, tuple(p for p in running if p != path)) for path in holding)
    return _Twins(places, forms, tuple(owned), code is not None and is_torchs(code.co_filename))


def _form(named: tuple[str, nn.Parameter]) -> Any:
    name, parameter = named
    return name, parameter.shape, parameter.dtype, parameter.requires_grad


def _holds(path: str, owner: str) -> bool:
    return not path or owner == path or owner.startswith(f"{path}.")


def _runs(kind: type, code: CodeType) -> bool:
    """Whether the code is a method of that class, or the rest of one behind a graph break: that begins in the method's lines."""
    return (code.co_filename, code.co_firstlineno) in _lines(kind)


@functools.lru_cache(1024)
def _lines(kind: type) -> frozenset[tuple[str, int]]:
    """The file and line of everything in the methods of a class, and in those that they override and call."""
    bases = [base for base in kind.__mro__[:-1] if base is not nn.Module]
    names, codes = {base.__name__ for base in bases} | {"super"}, []
    for method in dict.fromkeys(name for base in bases for name in vars(base)):
        for function in (vars(base).get(method) for base in bases):
            if isinstance(function, FunctionType):
                codes.append(function.__code__)
                if names.isdisjoint(function.__code__.co_names):
                    break
    return frozenset(
        (code.co_filename, line or code.co_firstlineno) for code in codes for _, _, line in code.co_lines()
    )


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
