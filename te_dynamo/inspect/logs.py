"""What the backend tells torch's logs and traces.

    TORCH_LOGS="te_dynamo"     a line for each graph: how much of it is in a recipe
    TORCH_LOGS="+te_dynamo"    each decision, each fusion, what runs each operation, and the graph after each stage
    TORCH_TRACE=FOLDER         the same as artifacts, which tlparse shows beside torch's own

Nothing is made into text when nobody listens.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections import Counter
from collections.abc import Sequence

from te_dynamo.report import MatchRecord, Report, coverage
from te_dynamo.torch_private.tracing import artifact, is_traced

_log = logging.getLogger("te_dynamo")


def is_heard() -> bool:
    """Whether anybody would see a graph."""
    return _log.isEnabledFor(logging.DEBUG) or is_traced()


def tell_decisions(report: Report) -> None:
    """Of one Dynamo graph: what was matched and left, with sizes, FLOPs and reasons."""
    linears = [match for match in report.matches if match.kind == "linear"]
    _log.info(
        "%d of %d linears of this graph are in a recipe, %.1f%% of their FLOPs",
        sum(match.matched for match in linears), len(linears), 100 * coverage(linears),
    )  # fmt: skip
    for match in report.matches:
        _log.debug("%s", _Decision(match))
    artifact(
        "te_dynamo_decisions",
        "json",
        lambda: json.dumps(
            {"coverage": coverage(linears), "matches": list(map(dataclasses.asdict, report.matches))}, indent=1
        ),
    )


def tell_fusions(phase: str, fired: Sequence[tuple[str, int]]) -> None:
    """The fusions that were applied to a graph, with their counts."""
    for name, times in fired:
        _log.debug("%s: %s, %d times", phase, name, times)
    artifact(f"te_dynamo_fusions_{phase}", "json", lambda: json.dumps(dict(fired), indent=1))


def tell_lowered(phase: str, lowered: Sequence[tuple[str, str]]) -> None:
    """(operation, what runs it) of a graph."""
    counts = Counter(lowered)
    for (op, runs), times in counts.items():
        _log.debug("%s: %d x %s runs as %s", phase, times, op, runs)
    rows = [{"op": op, "runs": runs, "count": times} for (op, runs), times in counts.items()]
    artifact(f"te_dynamo_lowered_{phase}", "json", lambda: json.dumps(rows, indent=1))


def tell_graph(stage: str, text: str) -> None:
    """The graph after a stage, as `capture` has it."""
    _log.debug("graph after %s\n%s", stage, text)
    artifact(f"te_dynamo_graph_{stage}", "string", lambda: text)


@dataclasses.dataclass(frozen=True)
class _Decision:
    """One record as a line, made when it is printed."""

    match: MatchRecord

    def __str__(self) -> str:
        match = self.match
        where = f"{match.kind} {match.module}{f' ({match.source})' if match.source else ''}"
        done = match.recipe or f"te.{match.kind}" if match.matched else f"left, {match.reason}"
        return f"{where}{' ' if match.shape else ''}{' x '.join(match.shape)}: {done}"
