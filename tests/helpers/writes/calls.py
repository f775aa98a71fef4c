"""Calls of every function that torch has: of its operator database, in each variant, and of what else it binds, with guessed arguments."""

from __future__ import annotations

import inspect
import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from helpers.writes.observed import spelled
from torch import Tensor
from torch.overrides import get_testing_overrides
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils._pytree import tree_map_only

Call = tuple[str, Any, tuple[Any, ...], dict[str, Any]]
"""A node's op, its target, its arguments."""

SAMPLES, LOOKED_AT = 3, 40
"""Of each operator: the first so many samples; of so many, those too that have other flags than any before."""


def _samples(op: OpInfo) -> Iterator[SampleInput]:
    supported = op.supported_dtypes("cpu")
    dtype = next((d for d in (torch.float32, torch.int64, torch.bool) if d in supported), None)
    seen = set()
    for number, sample in enumerate(
        itertools.islice(op.sample_inputs_func(op, "cpu", dtype, False), LOOKED_AT) if dtype else ()
    ):
        flags = [a for a in sample.args if isinstance(a, bool)]
        named = sorted((k, v if isinstance(v, bool) else v is None) for k, v in sample.kwargs.items())
        if number < SAMPLES or str((flags, named)) not in seen:
            yield sample
        seen.add(str((flags, named)))


def _copied(value: Any) -> Any:
    return tree_map_only(Tensor, lambda t: t.detach().clone() if t.layout == torch.strided else t, value)


def _variants(op: OpInfo) -> Iterator[tuple[str, Any]]:
    """The op and target of each way to call it."""
    for known in (op, *op.aliases):
        yield "call_function", getattr(known, "op", None) or op.op
        for method in (known.method_variant, known.inplace_variant):
            name = getattr(method, "__name__", "")
            if method is not None and getattr(torch.Tensor, name, None) is method:
                yield "call_method", name
            elif method is not None:
                yield "call_function", method
    packet = getattr(torch.ops.aten, op.name, None)
    overload = getattr(packet, "default", None)
    yield from (("call_function", f) for f in (op.operator_variant, op.inplace_operator_variant, packet, overload) if f)


def database_calls() -> Iterator[Call]:
    """Calls of torch's operator database."""
    for op in op_db:
        for sample in _samples(op):
            for kind, target in _variants(op):
                args, kwargs = _copied(((sample.input, *sample.args), dict(sample.kwargs)))
                yield kind, target, args, kwargs
                if op.supports_out and target is op.op:
                    args, kwargs = _copied((args, kwargs))
                    # Zeros: what is empty may lie where the result that was just freed lay, and so hold its bytes already.
                    out = tree_map_only(Tensor, torch.zeros_like, target(*args, **kwargs))
                    yield kind, target, args, kwargs | {"out": out}


# ---- functions that the database lacks

_NOT_TRIED = (
    "cudnn",
    "miopen",
    "mkldnn",
    "fbgemm",
    "distributed",
    "handle_torch",
    "lobpcg",
    "backward",
    "sparse",
    "quantized",
)
"""Of other devices, layouts or several processes; lobpcg takes a minute. Nor private ones, which do not check what they are given."""

_GUESSES: list[Callable[[], Any]] = [
    lambda: torch.randn(4, 4), lambda: 2, lambda: [torch.randn(4, 4)], lambda: torch.tensor([0, 1, 2, 3]), lambda: (4, 4),
    lambda: torch.rand(1, 4, 4, 4), lambda: 0.5, lambda: torch.rand(4) > 0.5, lambda: True,
]  # fmt: skip


def guessed_calls(known: Callable[[str], bool]) -> Iterator[Iterator[Call]]:
    """Of each function that torch binds or lets override, and that is not `known`: calls, of which some may be possible."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        arities = {f: _arity(dummy) for f, dummy in get_testing_overrides().items()}
    for owner in (torch._C._VariableFunctions, torch._C._nn, torch.nn.functional):
        bound = [getattr(owner, name) for name in dir(owner) if not name.startswith("_")]
        arities = {f: (1, 2, 3) for f in bound if callable(f) and not isinstance(f, type)} | arities
    foreach = [name for name in dir(torch) if name.startswith("_foreach_")]
    arities = {getattr(torch, name): (1, 2, 3) for name in foreach} | arities
    for function, needed in arities.items():
        name = getattr(function, "__name__", "__get__")
        private = name.startswith("_") and not name.startswith("_foreach_")
        if private or any(part in str(function) for part in _NOT_TRIED):
            continue
        method = getattr(torch.Tensor, name, None) is function
        kind, target = ("call_method", name) if method else ("call_function", function)
        if not known(spelled(kind, target)):
            yield _guesses(kind, target, needed)


def _guesses(kind: str, target: Any, arities: tuple[int, ...]) -> Iterator[Call]:
    for arity in arities:
        for makers in itertools.islice(itertools.product(_GUESSES, repeat=arity), 64):
            yield kind, target, tuple(make() for make in makers), {}


def _arity(dummy: Callable[..., Any]) -> tuple[int]:
    parameters = inspect.signature(dummy).parameters.values()
    return (sum(p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters),)
