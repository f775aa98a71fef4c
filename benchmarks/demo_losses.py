"""Losses of the demo in each recipe beside bf16's, from the runs that it wrote. Run it on the machine that trained: it records that one.

    python examples/train_text.py --seeds 3 --recipe float8_current_scaling,nvfp4 --out out
    python benchmarks/demo_losses.py out

A Llama is trained on bytes, once by Inductor and once in a recipe, from the same weights on the same batches. The training loss is the mean of
the last tenth of the steps, the validation loss that of eight batches; changes are to bf16's of that seed. Means are of all seeds, and missing
where a recipe lacks one. Tokens per second are of the median step, a mean over the seeds. A CPU computes the recipes' references, so it has none.
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
    """Losses in nats a byte; changes in percent of bf16's. seed: "seed 0", or "mean" of all."""

    recipe: str
    tokens_per_second: float | None
    seed: str
    training_loss: float
    training_change: float
    validation_loss: float
    validation_change: float


def _losses(runs: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """Means over the runs."""
    last = [fmean(run["losses"][-max(1, len(run["losses"]) // 10) :]) for run in runs]
    return fmean(last), fmean(run["validation_loss"] for run in runs)


def rows_of(files: Sequence[Mapping[str, Any]]) -> list[Row]:
    """bf16's first. Raises ValueError where the runs differ in their settings."""
    settings = files[0]["settings"]
    by_recipe: dict[str, dict[int, Mapping[str, Any]]] = {}
    for file in files:
        run = file["run"]
        if file["settings"] != settings:
            raise ValueError(f"{run['name']}, seed {run['seed']}, was trained with other settings: {file['settings']}")
        by_recipe.setdefault(run["name"], {})[run["seed"]] = run
    reference = by_recipe.get("bf16") or by_recipe["fp32"]
    if alone := set().union(*by_recipe.values()) - reference.keys():
        raise ValueError(f"seeds {sorted(alone)} have no run in {next(iter(reference.values()))['name']}")
    rows = []
    for name, by_seed in sorted(by_recipe.items(), key=lambda item: item[1] is not reference):
        speeds = [run["tokens_per_second"] for run in by_seed.values()]
        speed = None if settings["device"] == "cpu" else round(fmean(speeds), 1)
        groups = {f"seed {seed}": [seed] for seed in by_seed}
        if len(reference) > 1 and by_seed.keys() == reference.keys():
            groups["mean"] = list(by_seed)
        for group, seeds in groups.items():
            training, validation = _losses([by_seed[seed] for seed in seeds])
            expected = _losses([reference[seed] for seed in seeds])
            changes = (round(100 * (training / expected[0] - 1), 2), round(100 * (validation / expected[1] - 1), 2))
            rows.append(Row(name, speed, group, round(training, 4), changes[0], round(validation, 4), changes[1]))
    return rows


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("runs", type=pathlib.Path, help="the demo's --out, with a run-*.json of each run")
    args = parser.parse_args()
    files = [json.loads(path.read_text()) for path in sorted(args.runs.glob("run-*.json"))]
    if not files:
        parser.error(f"{args.runs} has no run-*.json")
    settings = files[0]["settings"]
    report.write(args.out, "demo_losses", collect(settings["device"]), rows_of(files), **settings)


if __name__ == "__main__":
    main()
