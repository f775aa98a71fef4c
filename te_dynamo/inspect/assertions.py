"""What a team's tests hold a model to: the `assert_*` methods of `Explanation`.

Their errors are AssertionErrors, so that pytest and unittest count a failed test and not a broken one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from te_dynamo.errors import CoverageError, GraphBreakError, InvalidOptionError
from te_dynamo.options import share as checked_share
from te_dynamo.report import MatchRecord, coverage
from te_dynamo.rules.places import check

if TYPE_CHECKING:
    from te_dynamo.inspect.dynamo import GraphBreak


def check_quantized(linears: Sequence[MatchRecord], pattern: str) -> None:
    """Raises CoverageError where a linear whose path has a match of `pattern` is left, or where there is no such linear."""
    if not isinstance(pattern, str):
        raise InvalidOptionError(f"te_dynamo: assert_quantized takes a regular expression, got {pattern!r}")
    check(pattern)
    named = [match for match in linears if re.search(pattern, match.module)]
    left = [match for match in named if not match.matched]
    if not named:
        paths = ", ".join(dict.fromkeys(match.module or "(no module)" for match in linears)) or "none"
        raise CoverageError(f"te_dynamo: no linear's module path matches {pattern!r}; the model's linears: {paths}")
    if left:
        raise CoverageError.of(f"{len(left)} of the {len(named)} linears that match {pattern!r} are in no recipe", left)


def check_coverage(linears: Sequence[MatchRecord], least: float) -> None:
    """Raises CoverageError where the share of linear FLOPs in a recipe is below `least`, 0 to 1, or not known."""
    share, least = coverage(linears), checked_share("assert_coverage", least)
    left = [match for match in linears if not match.matched]
    if share < least:
        raise CoverageError.of(f"{share:.1%} of the linear FLOPs are in a recipe, and {least:.1%} were asked for", left)
    if unknown := [match for match in left if not match.shape and not match.flops]:
        asked = f"the share of the linear FLOPs in a recipe is not known, and {least:.1%} were asked for"
        raise CoverageError.of(f"{asked}: {len(unknown)} linears that are left have no known size", left)


def check_no_graph_breaks(breaks: Sequence[GraphBreak], graphs: int, linears: Sequence[MatchRecord]) -> None:
    """Raises GraphBreakError with each break's line and reason, or with those of the linears where there is no graph."""
    if breaks:
        rows = "\n".join(f"    {stop.source or '(unknown line)'}: {stop.reason}" for stop in breaks)
        raise GraphBreakError(f"te_dynamo: no graph breaks were asked for, and there are {len(breaks)}:\n{rows}")
    if not graphs:
        reasons = dict.fromkeys(match.reason for match in linears if match.reason)
        listed = "\n".join(f"    {reason}" for reason in reasons) or "    nothing of it is compiled"
        raise GraphBreakError(f"te_dynamo: one graph was asked for, and there is none:\n{listed}")
