"""Rules for `options={"rules": ...}` that leave the linears which cost the most accuracy in the model's own precision."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence

from te_dynamo.accuracy.rows import LinearAccuracy
from te_dynamo.errors import InputError

_BELOW_THE_MEDIAN = 6.0
"""dB: twice the error of the median linear."""


def suggested_modules(
    rows: Sequence[LinearAccuracy], min_snr: float | None = None, max_layers: int | None = None
) -> list[str]:
    """Paths of the modules with a linear below `min_snr` dB, or with NaN from the recipe; first those that gain the most dB a FLOP.

    min_snr: None takes 6 dB below the median of all linears. What a module gains is what it lacks to it.
    max_layers: None takes all.
    """
    if max_layers is not None and (not isinstance(max_layers, int) or max_layers < 0):
        raise InputError(f"te_dynamo: max_layers is a number of modules, got {max_layers!r}")
    modules: dict[str, list[LinearAccuracy]] = {}
    for row in rows:
        if row.module:
            modules.setdefault(row.module, []).append(row)
    known = [row.snr_db for row in rows if row.snr_db is not None]
    if min_snr is None:
        min_snr = statistics.median(known) - _BELOW_THE_MEDIAN if known else 0.0
    values = {}
    for module, its_rows in modules.items():
        snr = min((row.snr_db for row in its_rows if row.snr_db is not None), default=min_snr)
        lacks = min_snr - snr if all(row.finite for row in its_rows) else float("inf")
        if lacks > 0:
            values[module] = lacks / max(sum(row.flops for row in its_rows), 1)
    return sorted(values, key=lambda module: -values[module])[:max_layers]


def rule_for(module: str) -> tuple[str, None]:
    """The rule that leaves the linears of a module in the model's precision."""
    return f"^{re.escape(module)}$", None
