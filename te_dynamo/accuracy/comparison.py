"""The results of `compare` and `compare_recipes`: tables, plain data, a plot, rules."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from te_dynamo.accuracy.rows import PRODUCTS, TENSORS, LinearAccuracy
from te_dynamo.accuracy.suggest import rule_for, suggested_modules
from te_dynamo.inspect.tables import FittedTable, paragraph, text_of
from te_dynamo.recipe import Recipe

_WORST_FIRST = "SNR in dB, the worst linear first"
_BEST_FIRST = "SNR in dB, the best recipe first, by the lower one of output and gradients"

Rules = Sequence[tuple[str, "Recipe | None"]]


class Comparison:
    """What a recipe costs in accuracy. str() is a table, the worst linear first.

    recipe:  its name.
    rows:    one a linear that is in a recipe, the worst first; in_order: in the model's order.
    summary: of the whole model; `to_dict` says what is in it.
    """

    def __init__(
        self,
        recipe: str,
        rows: Sequence[LinearAccuracy],
        summary: Mapping[str, Any],
        notes: Sequence[str] = (),
        rules: Rules = (),
    ) -> None:
        self.recipe, self.notes, self.in_order, self._rules = recipe, list(notes), list(rows), list(rules)
        self.rows = sorted(rows, key=_badness)
        known = [row.snr_db for row in rows if row.snr_db is not None]
        self.summary: dict[str, Any] = {
            "recipe": recipe,
            **summary,
            "worst_snr_db": min(known, default=None),
            "median_snr_db": statistics.median(known) if known else None,
        }

    def to_dict(self) -> dict[str, Any]:
        """Plain data: {"rows": [...], "summary": {...}}.

        "rows" hold LinearAccuracy's fields, those of its tensors as "snr_x_db", "x_flushed" and so on. "summary" holds "recipe", "linears" in
        it of "linears_in_all", "coverage" (share of linear FLOPs), "steps"; "worst_snr_db" and "median_snr_db" of the rows; of the whole model
        "loss", "loss_recipe", "loss_change", "snr_output_db", "snr_gradients_db" and "gradients" ({parameter: dB}, the worst first), None where
        there was none; "notes".
        """
        return {"rows": [row.to_dict() for row in self.rows], "summary": {**self.summary, "notes": self.notes}}

    def suggest_rules(
        self, min_snr: float | None = None, max_layers: int | None = None
    ) -> list[tuple[str, Recipe | None]]:
        """Rules for options={"rules": ...} that leave linears below `min_snr` dB in the model's precision; [] where there are none.

        The first gains the most dB a FLOP. The rules of the comparison's own options follow them.
        min_snr:    None takes 6 dB below the median of all linears.
        max_layers: how many modules at most; None takes all.
        """
        return [*map(rule_for, suggested_modules(self.rows, min_snr, max_layers)), *self._rules]

    def plot(self, path: Any) -> None:
        """Writes a picture: the SNR of each linear's products, in the model's order. Needs matplotlib; ImportError without it."""
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError("te_dynamo: Comparison.plot needs matplotlib: pip install matplotlib") from error
        rows = self.in_order
        figure = Figure(figsize=(max(6.0, 0.16 * len(rows)), 5.0), layout="constrained")
        axes = figure.subplots()
        for name in PRODUCTS:
            values = [getattr(row, f"{name}_snr_db") for row in rows]
            if any(value is not None for value in values):
                axes.plot([float("nan") if value is None else value for value in values], ".-", label=name)
        axes.set_xticks(range(len(rows)), [row.module for row in rows], rotation=90, fontsize=6)
        axes.set_ylabel("signal to quantization noise, dB")
        axes.set_title(f"{self.recipe} against the model's own precision")
        axes.grid(alpha=0.3)
        axes.legend()
        figure.savefig(str(path))

    def __repr__(self) -> str:
        return f"<Comparison: {_headline(self.summary)}>"

    def _repr_html_(self) -> str:
        """The page's tab Numerics with the terminal's table, for a notebook."""
        from te_dynamo.inspect.page import in_notebook
        from te_dynamo.inspect.page.numerics import numerics

        return in_notebook(numerics=numerics(self), title=_WORST_FIRST, table=self._table())

    def __str__(self) -> str:
        notes = [paragraph(f"note: {note}") for note in self.notes]
        return text_of([paragraph(_headline(self.summary)), f"\n{_WORST_FIRST}", self._table(), *notes])

    def _table(self) -> FittedTable:
        columns = ("module", "source", "M x N x K", *PRODUCTS, *TENSORS, "flushed", "saturated", "amax of x", "note")
        return FittedTable("", columns, map(_cells, self.rows), optional=("source", "amax of x", "M x N x K", *TENSORS))


class RecipesCompared:
    """Several recipes on one model. str() is a table with a row for each, the best first.

    comparisons: by the recipes' names, each a Comparison.
    """

    def __init__(self, comparisons: Sequence[Comparison]) -> None:
        self.comparisons = {found.recipe: found for found in sorted(comparisons, key=_recipe_badness)}

    def to_dict(self) -> dict[str, Any]:
        """Plain data: the `to_dict` of each comparison by the recipe's name, the best first."""
        return {recipe: found.to_dict() for recipe, found in self.comparisons.items()}

    def __repr__(self) -> str:
        best = next(iter(self.comparisons), "none")
        return f"<RecipesCompared: {', '.join(self.comparisons)}; the most accurate is {best}>"

    def _repr_html_(self) -> str:
        """The same table, for a notebook."""
        from te_dynamo.inspect.page import in_notebook

        return in_notebook(title=_BEST_FIRST, table=self._table(), notes=self._notes())

    def __str__(self) -> str:
        return text_of([_BEST_FIRST, self._table(), *map(paragraph, self._notes())])

    def _table(self) -> FittedTable:
        columns = (
            "recipe", "linears", "FLOPs", "worst linear", "worst", "median", "model's output", "gradients", "loss", "change",
        )  # fmt: skip
        rows = map(_recipe_cells, self.comparisons.values())
        return FittedTable("", columns, rows, optional=("loss", "FLOPs", "median"))

    def _notes(self) -> list[str]:
        """Each once, though several recipes have it."""
        return list(dict.fromkeys(f"note: {note}" for found in self.comparisons.values() for note in found.notes))


def _badness(row: LinearAccuracy) -> tuple[bool, float]:
    return row.finite, float("inf") if row.snr_db is None else row.snr_db


def _recipe_badness(found: Comparison) -> tuple[bool, float]:
    """By what the whole model loses, else by the median linear."""
    summary = found.summary
    known = [summary[name] for name in ("snr_output_db", "snr_gradients_db") if summary[name] is not None]
    snr = min(known) if known else summary["median_snr_db"]
    return not all(row.finite for row in found.rows), float("inf") if snr is None else -snr


def _headline(summary: Mapping[str, Any]) -> str:
    parts = [
        f"{summary['recipe']}: {summary['linears']} of {summary['linears_in_all']} linears, {summary['coverage']:.1%} of linear FLOPs; "
        f"{summary['steps']} step{'' if summary['steps'] == 1 else 's'}"
    ]
    if summary["loss_change"] is not None:
        loss, found = summary["loss"], summary["loss_recipe"]
        parts.append(f"loss {loss:.6g}, in the recipe {found:.6g} ({_change(summary)})")
    for what, name in (("outputs", "snr_output_db"), ("gradients", "snr_gradients_db")):
        if summary[name] is not None:
            parts.append(f"the model's {what} {summary[name]:.1f} dB")
    return "; ".join(parts)


def _cells(row: LinearAccuracy) -> tuple[str, ...]:
    tensors = [row.tensors.get(name) for name in TENSORS]
    x = tensors[0]
    spread = "" if x is None or x.amax_spread is None or x.amax_spread < 1.005 else f" (x{x.amax_spread:.2f})"
    return (
        row.module,
        row.source,
        " x ".join(row.shape),
        *(_decibels(getattr(row, f"{name}_snr_db")) for name in PRODUCTS),
        *(_decibels(None if tensor is None else tensor.snr_db) for tensor in tensors),
        *(
            ", ".join(
                f"{name} {getattr(tensor, share):.1%}"
                for name, tensor in zip(TENSORS, tensors, strict=True)
                if tensor is not None and getattr(tensor, share) >= 0.001
            )
            for share in ("flushed", "saturated")
        ),
        "" if x is None else _number(x.amax) + spread,
        row.note,
    )


def _recipe_cells(found: Comparison) -> tuple[str, ...]:
    summary = found.summary
    return (
        found.recipe,
        f"{summary['linears']} of {summary['linears_in_all']}",
        f"{summary['coverage']:.1%}",
        found.rows[0].module if found.rows else "",
        *(_decibels(summary[name]) for name in ("worst_snr_db", "median_snr_db", "snr_output_db", "snr_gradients_db")),
        _number(summary["loss_recipe"]),
        _change(summary),
    )


def _change(summary: Mapping[str, Any]) -> str:
    return "" if summary["loss_change"] is None else f"{summary['loss_change']:+.3%}"


def _decibels(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
