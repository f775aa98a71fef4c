"""The times in `passes/torch_ir/match/cost.py`, fitted to a run of few_rows.py.

    python benchmarks/fit_cost.py benchmarks/results/few_rows-nvidia-h200.json

us of a linear = fixed + weight (N K / 1e6) + rows (M (K + N) / 1e6) + flops / (1e6 teraflops); forward alone has no dy, so M K there, and
bf16 quantizes nothing. Least squares of relative errors on the models that are linears alone, the more weight the nearer FP8 is
to bf16: what lies far from a border decides nothing. Then, for each case and number of rows, what was measured and what is computed.
"""

from __future__ import annotations

import argparse
import math
import pathlib
from typing import Any

import report
import torch
from few_rows import CASES, MODES, RECIPES
from torch import nn

_NEAR = 0.3  # a speed that far from bf16's has a weight of 1/e


def linears_of(case: str) -> list[nn.Linear] | None:
    """The layers of the case with that title, None for a model that has other layers too."""
    with torch.device("meta"):
        layers = list(next(make for title, _, make in CASES.values() if title == case)())
    return layers if all(isinstance(layer, nn.Linear) for layer in layers) else None


def features(row: dict[str, Any]) -> list[float]:
    """[fixed, weight, rows, flops] of all linears of a row's case."""
    backward = row["mode"] != MODES[0]
    sums = [0.0] * 4
    for linear in linears_of(row["case"]) or ():
        n, k, m = linear.out_features, linear.in_features, row["rows"]
        found = (1, n * k / 1e6, m * (k + n * backward) / 1e6, 2 * m * n * k * (3 if backward else 1) / 1e6)
        sums = [a + b for a, b in zip(sums, found, strict=True)]
    return sums


def fit(table: list[list[float]], us: list[float], nearness: list[float]) -> list[float]:
    """A factor for each column of the table."""
    weights = torch.tensor(nearness, dtype=torch.float64) / torch.tensor(us, dtype=torch.float64)
    matrix = torch.tensor(table, dtype=torch.float64) * weights[:, None]
    return (
        torch.linalg.lstsq(matrix, (torch.tensor(us, dtype=torch.float64) * weights)[:, None]).solution[:, 0].tolist()
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=pathlib.Path, help="a .json file of few_rows.py")
    measured = report.read(parser.parse_args().report).rows
    for mode in MODES:
        rows = [row for row in measured if row["mode"] == mode and linears_of(row["case"])]
        near = [math.exp(-(((row["bf16_us"] / row["all_us"] - 1) / _NEAR) ** 2)) for row in rows]
        bf16 = fit([features(row)[::3] for row in rows], [row["bf16_us"] for row in rows], near)
        print(f"{mode}\n  bf16: fixed {bf16[0]:.1f}, teraflops {1 / bf16[1]:.0f}")
        for recipe in RECIPES:
            chosen = [(row, weight) for row, weight in zip(rows, near, strict=True) if row["recipe"] == recipe]
            found = fit(
                [features(row) for row, _ in chosen], [row["all_us"] for row, _ in chosen], [w for _, w in chosen]
            )
            fixed, weight, of_rows, flops = found
            print(f"  {recipe}: fixed {fixed:.1f}, weight {weight:.2f}, rows {of_rows:.2f}, teraflops {1 / flops:.0f}")
            for row, _ in chosen:
                sums = features(row)
                computed = (bf16[0] * sums[0] + bf16[1] * sums[3]) / sum(
                    a * b for a, b in zip(found, sums, strict=True)
                )
                print(
                    f"    {row['case']:32} {row['rows']:5} rows: {row['bf16_us'] / row['all_us']:.2f}x bf16, computed {computed:.2f}x"
                )


if __name__ == "__main__":
    main()
