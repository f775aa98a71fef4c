"""`require_coverage`: an error where too little is in a recipe.

Of each graph the backend knows the share. What runs in no graph it never sees: where `te_dynamo.compile` wraps the model, each call is held
to it too.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import nn

from te_dynamo.errors import CoverageError
from te_dynamo.inspect.dynamo import Seen, cause_of
from te_dynamo.inspect.graphs.capture import reports_heard
from te_dynamo.inspect.left_out import linears_of, why_in_no_graph
from te_dynamo.inspect.target import unwrap
from te_dynamo.options import Options
from te_dynamo.report import Report, coverage
from te_dynamo.user_code import modules_at

Model = TypeVar("Model", bound=Callable[..., Any])

_calls_of_graphs = 0


@dataclasses.dataclass
class _Known:
    """Of a model: the paths of the linears in the graphs that were compiled so far; what was wrong with the last call that compiled any."""

    paths: set[str] = dataclasses.field(default_factory=set)
    wrong: str = ""


_models: WeakKeyDictionary[nn.Module, _Known] = WeakKeyDictionary()


def require_coverage(options: Options, report: Report) -> None:
    """Raises CoverageError where less of a graph's linear FLOPs is in a recipe than the option asks for."""
    linears = [match for match in report.matches if match.kind == "linear"]
    share = coverage(linears)
    if options.require_coverage and any(match.flops for match in linears) and share < options.require_coverage:
        asked = f"{share:.1%} of the linear FLOPs of this graph are in a recipe, and require_coverage asks for {options.require_coverage:.1%}"
        raise CoverageError.of(asked, [match for match in linears if not match.matched])


def counted(graph: Callable[..., Any]) -> Callable[..., Any]:
    """`graph`, whose calls are counted: `hold_coverage` asks whether any ran."""

    def run(*args: Any) -> Any:
        global _calls_of_graphs
        _calls_of_graphs += 1
        return graph(*args)

    return run


def hold_coverage(compiled: Model, least: float) -> Model:
    """What torch.compile made, whose calls raise CoverageError where nothing ran in a graph, where Dynamo's limit of compilations is met,
    or where code that Dynamo did not compile holds more than 1 - `least` of the weights of the model's linears."""
    target, _ = unwrap(compiled)
    forward = compiled.forward if isinstance(target, nn.Module) else compiled  # type: ignore[attr-defined]
    own = _Known()

    @functools.wraps(forward)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or torch._dynamo.eval_frame._stance.stance == "force_eager":
            return forward(*args, **kwargs)
        calls, before = _calls_of_graphs, _given_up()
        with reports_heard() as reports:
            result = forward(*args, **kwargs)
        given_up = list(_given_up() - before)
        known = _models.setdefault(target, own) if isinstance(target, nn.Module) else own
        rows = [match for report in reports for match in report.matches if match.kind == "linear"]
        known.paths.update(path for row in rows for path in (row.module, *row.shared))
        ran_none = calls == _calls_of_graphs
        if given_up or reports or (ran_none and not known.wrong):
            known.wrong = _what_is_wrong(target, least, known, given_up, ran_none)
        if known.wrong:
            raise CoverageError(f"te_dynamo: require_coverage asks for {least:.1%}, and {known.wrong}")
        return result

    if isinstance(target, nn.Module):
        compiled.forward = checked  # type: ignore[attr-defined]
        return compiled
    return checked  # type: ignore[return-value]


def _given_up() -> Counter[str]:
    """What Dynamo could not compile so far, and went on behind or not."""
    counters = torch._dynamo.utils.counters
    return counters["unimplemented"] + counters["graph_break"]


def _what_is_wrong(target: Any, least: float, known: _Known, given_up: Sequence[str], ran_none: bool) -> str:
    """given_up: what Dynamo could not compile in this call. ran_none: whether no graph ran."""
    paths = linears_of(target)
    left = paths
    if not ran_none:  # what was given up in an earlier call runs as it is, and Dynamo does not count it again
        left = [path for path in paths if path not in known.paths] if given_up or known.wrong else []
    modules = modules_at(target)
    weights = {path: sum(p.numel() for p in modules[path][-1].parameters() if p.dim() > 1) for path in paths}
    too_few = sum(weights[path] for path in left) > (1 - least) * sum(weights.values())
    stopped = any(message.startswith("Dynamo recompile limit exceeded") for message in given_up)
    if not too_few and not stopped and not (ran_none and not isinstance(target, nn.Module)):
        return ""
    reasons = dict.fromkeys(why_in_no_graph(target, path, Seen(), modules) for path in left or [""])
    reasons |= dict.fromkeys(map(cause_of, given_up))
    why = [f"    {reason}" for reason in reasons if reason] or [
        "    Dynamo compiles nothing of it: is it turned off (TORCH_COMPILE_DISABLE=1)?"
    ]
    named = ", ".join([*left[:5], *([".."] if len(left) > 5 else [])]) or "code"
    return "\n".join([f"{named} ran in no graph:", *why])
