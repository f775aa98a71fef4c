"""Draws the plots of docs/performance.md from the results: `python docs/make_plots.py`, after `python benchmarks/report.py`."""

from __future__ import annotations

import pathlib
import sys

import matplotlib.pyplot as plt

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import report  # noqa: E402

MODES = ("forward", "forward and backward")


def main() -> None:
    """docs/few_rows-<device>.png of every run: how many times as fast as bf16 each model is, by the number of its rows."""
    for path in sorted(report.RESULTS.glob("few_rows-*.json")):
        run = report.read(path)
        rows = [row for row in run.rows if row["recipe"] == "current"]
        figure, panels = plt.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
        for axes, mode in zip(panels, MODES, strict=True):
            for case in dict.fromkeys(row["case"] for row in rows):
                line = [(row["rows"], row["te_speedup"]) for row in rows if (row["case"], row["mode"]) == (case, mode)]
                axes.plot(*zip(*line, strict=True), marker="o", label=case)
            axes.axhline(1, color="grey", linewidth=1)
            axes.set(title=mode, xlabel="tokens")
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter("{x:.0f}")
        panels[0].set_ylabel(f"speedup over bf16, {run.environment['device']}")
        panels[0].legend(fontsize="small")
        figure.savefig(ROOT / "docs" / f"{path.stem}.png", dpi=110)


if __name__ == "__main__":
    main()
