"""From how many rows on a linear is in FP8, by GPU: computed by `passes/torch_ir/match/cost.py`, not measured.

    python benchmarks/cost_borders.py

Weights are quantized in each call. The rule has times of an H200, and takes another GPU's from its published bandwidth and rates. "-" stands
for no number of rows up to 100,000, "any" for a recipe that the GPU emulates: it is chosen for its numbers, and not asked.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterator

import environment
import report

from te_dynamo.kernels.runtime.target import TARGETS
from te_dynamo.passes.torch_ir.match.cost import linear_cost_reason, linear_times
from te_dynamo.rates import Rates, published
from te_dynamo.recipe import Float8BlockScaling, Float8CurrentScaling, MXFP8BlockScaling, Recipe

LINEARS = ((28672, 8192), (14336, 4096), (4096, 14336), (4096, 4096), (2048, 2048), (4096, 1024), (1024, 1024))
MODES = {"forward": ("fprop",), "training": ("fprop", "dgrad", "wgrad")}
RECIPES = {
    "current": Float8CurrentScaling(),
    "block": Float8BlockScaling(),
    "MXFP8": MXFP8BlockScaling(),
    "MXFP8 in 128": MXFP8BlockScaling(scale_block=128),
}
MOST_ROWS = 100_000


@dataclasses.dataclass
class Row:
    """linear: N x K. how: the mode and the recipe. rows: the fewest that FP8 repays."""

    linear: str
    gpu: str
    how: str
    rows: int | str


def border(n: int, k: int, gemms: tuple[str, ...], recipe: Recipe, rates: Rates) -> int | str:
    """The fewest rows at which the rule has a linear in FP8; "any" where it is not asked, "-" where there are none."""
    if not linear_times(1, n, k, gemms, recipe, rates):
        return "any"
    counts = range(1, MOST_ROWS + 1)
    found = bisect.bisect_left(counts, True, key=lambda m: linear_cost_reason(m, n, k, gemms, recipe, rates) == "")
    return counts[found] if found < MOST_ROWS else "-"


def rows() -> Iterator[Row]:
    for n, k in LINEARS:
        for target in TARGETS.values():
            for mode, gemms in MODES.items():
                for name, recipe in RECIPES.items():
                    found = border(n, k, gemms, recipe, published(target))
                    yield Row(f"{n} x {k}", target.name, f"{mode}, {name}", found)


if __name__ == "__main__":
    report.write(report.parser(__doc__).parse_args().out, "cost_borders", environment.collect("cpu"), list(rows()))
