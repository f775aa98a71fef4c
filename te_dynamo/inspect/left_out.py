"""What ran in no graph, and why: code that Dynamo skipped, that is disabled for it, or that it has compiled as often as it may."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import CodeType
from typing import Any

import torch
from torch import nn

from te_dynamo.inspect.dynamo import GraphBreak, Seen
from te_dynamo.inspect.flops import MatrixFlops, share_with_rows
from te_dynamo.report import MatchRecord
from te_dynamo.torch_private.recompile_limit import past_limit, the_rest
from te_dynamo.user_code import is_torchs, modules_at


def breaks_and_skips(seen: Seen) -> list[GraphBreak]:
    """Where Dynamo split the model, and what it skipped of it as a whole."""
    return [
        *seen.breaks,
        *(GraphBreak(stop.source, _skips(code.co_name, stop)) for code, stop in seen.skipped.items()),
    ]


def rows_left_out(
    target: Callable[..., Any], found: MatrixFlops | None, rows: Sequence[MatchRecord], seen: Seen
) -> Iterator[MatchRecord]:
    """A record for each module that multiplied by weights and has no row: it ran the graph of another one, or is in none.

    found: None where the model's products cannot be counted: then a record without a size for each linear that is known to be in no graph.
    """
    if found is not None and share_with_rows(found, rows) == 1.0:
        return
    if not isinstance(target, nn.Module):
        flops = 0 if found is None else found.by_weight.total() - sum(row.flops for row in rows)
        reason = why_in_no_graph(target, "", seen, {})
        if reason or (flops > 0 and seen.breaks):
            reason = reason or _between_graphs(seen)
            yield MatchRecord("linear", matched=False, reason=reason, flops=flops)
        return
    stacks = modules_at(target)
    modules = {path: stack[-1] for path, stack in stacks.items()}
    known = {id(modules[row.owner]) for row in rows if row.owner in modules}
    counted = dict.fromkeys(linears_of(target), 0) if found is None else found.by_weight
    for path, flops in counted.items():
        if id(modules.get(path)) in known or any(row.module.startswith(f"{path}." if path else "") for row in rows):
            continue
        reason = why_in_no_graph(target, path, seen, stacks)
        twins = {at: row for row in rows if (at := f"{path}.{row.parameter}".strip(".")) in row.shared}
        if twins:
            for at, twin in twins.items():
                own = twin.flops if len(twins) > 1 else flops
                yield dataclasses.replace(twin, module=at, flops=own, shared=(twin.module,))
        elif reason or found is not None:
            yield MatchRecord("linear", path, matched=False, reason=reason or _between_graphs(seen), flops=flops)


def linears_of(target: Any) -> list[str]:
    """The paths of a module's linears and recurrent layers, by what they own; none of a function's."""
    return [
        path
        for path, stack in modules_at(target).items()
        if isinstance(stack[-1], nn.RNNBase) or _owns_a_matrix(stack[-1])
    ]


def _owns_a_matrix(module: nn.Module) -> bool:
    weight = module._parameters.get("weight")
    return weight is not None and weight.dim() == 2 and "Embedding" not in type(module).__name__


def _runs_in_onednn(module: nn.Module) -> bool:
    return torch.backends.mkldnn.is_available() and all(p.device.type == "cpu" for p in module.parameters())


def why_in_no_graph(target: Any, path: str, seen: Seen, modules: Mapping[str, list[nn.Module]]) -> str:
    """Why the code of the module at `path`, or code around it, is in no graph; "" where nothing says so.

    seen: what Dynamo did in a run of `target`, a module or a function. modules: `modules_at(target)`.
    """
    module = modules[path][-1] if isinstance(target, nn.Module) else None
    if isinstance(module, nn.RNNBase):
        if isinstance(module, nn.LSTM) and torch.is_grad_enabled() and _runs_in_onednn(module):
            return (
                "Dynamo leaves nn.LSTM as it is, and torch fails on its gradient on a CPU where torch._dynamo.config.allow_rnn = True has it "
                "compiled"
            )
        return (
            f"Dynamo leaves nn.{type(module).__name__} as it is; with torch._dynamo.config.allow_rnn = True Inductor compiles it, "
            "in the model's precision"
        )
    for name, function in _around(target, path, modules):
        if getattr(function, "_torchdynamo_disable", False):
            return f"Dynamo left the code that runs it as it is: {name} is disabled for the compiler (torch.compiler.disable)"
        for code in _codes_of(function):
            if stop := seen.skipped.get(code):
                return _skips(name, stop)
            if past := seen.past_limit(code):
                return past_limit(the_rest(past, name) or name, seen.limit)
        in_place = getattr(getattr(function, "__self__", None), "_compiled_call_impl", None) is not None
        if in_place and any(is_torchs(code.co_filename) for code in _codes_of(function)):
            return f"module.compile() compiles no code of torch's own, as {name} is; torch.compile(module) compiles it"
    return ""


def _between_graphs(seen: Seen) -> str:
    """Of code that was neither given up nor disabled as a whole."""
    breaks = list(dict.fromkeys(seen.breaks))
    if len(breaks) == 1:
        return (
            f"Dynamo left the code that runs it as it is, at the graph break in {breaks[0].source}: {breaks[0].reason}"
        )
    if breaks:
        return f"Dynamo left the code that runs it as it is, at one of {len(breaks)} graph breaks; explain lists them"
    return "it is in a graph, in a product that te_dynamo has no match for, such as attention with learned queries"


def _skips(name: str, stop: GraphBreak) -> str:
    return f"Dynamo skips all of {name}: {stop.reason}"


def _around(target: Any, path: str, modules: Mapping[str, list[nn.Module]]) -> Iterator[tuple[str, Any]]:
    """(its name, the function) of the module at `path` and of each module around it, from the inside out."""
    if not isinstance(target, nn.Module):
        yield getattr(target, "__name__", type(target).__name__), target
        return
    parts = path.split(".") if path else []
    for end in range(len(parts), -1, -1):
        for module in reversed(modules[".".join(parts[:end])]):
            yield f"{type(module).__name__}.forward", module.forward
    yield (
        f"{type(target).__name__}.forward",
        torch._dynamo.external_utils.wrap_inline(target),
    )  # what Dynamo compiles of torch's


def begins_in(target: nn.Module, code: CodeType) -> bool:
    """Whether code that Dynamo compiles is where a call of `target` begins, or torch's own way there."""
    torchs = code.co_filename.startswith(os.path.dirname(torch.__file__))
    return torchs or any(code in _codes_of(function) for _, function in _around(target, "", {"": [target]}))


def _codes_of(function: Any) -> Iterator[CodeType]:
    while function is not None:
        if isinstance(code := getattr(function, "__code__", None), CodeType):
            yield code
        function = getattr(function, "__wrapped__", None)
