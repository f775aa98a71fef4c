"""Losses of the demo in each recipe beside bf16's, from the summaries that it wrote: no GPU.

    for recipe in float8_current_scaling nvfp4; do python examples/train_text.py --recipe $recipe --out out/$recipe; done
    python benchmarks/demo_losses.py out/*/summary.json

A Llama is trained on bytes, once by Inductor and once in a recipe, from the same weights on the same batches. The training loss is the mean of
the last tenth of the steps, the validation loss that of eight batches; changes are to bf16's. A CPU computes the recipes' references.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import report
from environment import collect


@dataclasses.dataclass(frozen=True)
class Row:
    """Losses in nats a byte; changes in percent of bf16's."""

    recipe: str
    training_loss: float
    training_change: float
    validation_loss: float
    validation_change: float


def _losses(run: Mapping[str, Any]) -> tuple[float, float]:
    return fmean(run["losses"][-max(1, len(run["losses"]) // 10) :]), run["validation_loss"]


def rows_of(summaries: Sequence[Mapping[str, Any]]) -> list[Row]:
    """bf16's first, which all summaries have. Raises ValueError where they differ in it or in their settings."""
    reference, expected = summaries[0]["runs"][0], _losses(summaries[0]["runs"][0])
    rows = [Row(reference["name"], expected[0], 0.0, expected[1], 0.0)]
    for summary in summaries:
        if _losses(summary["runs"][0]) != expected or _settings(summary) != _settings(summaries[0]):
            raise ValueError(
                f"{summary['arguments']['recipe']} was trained beside another bf16 run, or with other settings"
            )
        for run in summary["runs"][1:]:
            found = _losses(run)
            changes = [100 * (ours / theirs - 1) for ours, theirs in zip(found, expected, strict=True)]
            rows.append(Row(run["name"], found[0], changes[0], found[1], changes[1]))
    return [dataclasses.replace(row, **{k: round(v, 4) for k, v in vars(row).items() if k != "recipe"}) for row in rows]


def _settings(summary: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in summary["arguments"].items() if key not in ("recipe", "out")}


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("summaries", type=pathlib.Path, nargs="+", help="the summary.json of each run")
    args = parser.parse_args()
    summaries = [json.loads(path.read_text()) for path in args.summaries]
    report.write(
        args.out,
        "demo_losses",
        collect(summaries[0]["arguments"]["device"]),
        rows_of(summaries),
        **_settings(summaries[0]),
    )


if __name__ == "__main__":
    main()
