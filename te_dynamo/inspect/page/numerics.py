"""The tab Numerics: what `te_dynamo.compare` found, in words, as dots in the model's order, and as a table."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from te_dynamo.accuracy.comparison import Comparison

_SHOWN = {
    "module": "module",
    "snr_output_db": "output",
    "snr_dx_db": "dx",
    "snr_dw_db": "dw",
    "snr_x_db": "x",
    "snr_weight_db": "weight",
    "snr_dy_db": "dy",
    "shape": "M x N x K",
    "note": "note",
}
"""field -> title of the columns that are always there; the others are on demand"""

_DRAWN = ("output", "dx", "dw")
_SHARES = ("_saturated", "_flushed", "_zero")
_LEFT, _TOP = 6.0, 4.0  # percent of the plot that its labels take
_BOTTOM = 92.0


def numerics(comparison: Comparison) -> dict[str, Any]:
    """{"cards", "plot", "rules", "columns", "rows", "notes"}"""
    found = comparison.to_dict()
    rows = found["rows"]
    return {
        "cards": list(_cards(found["summary"], rows)),
        "plot": _plot([row.to_dict() for row in comparison.in_order]),
        "rules": _rules(comparison.suggest_rules()),
        "columns": _columns(rows),
        "rows": rows,
        "notes": found["summary"]["notes"],
    }


def _cards(summary: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> Any:
    steps = f"{summary['steps']} step{'' if summary['steps'] == 1 else 's'}"
    coverage = f"coverage {summary['coverage'] * 100:.4g}% of linear FLOPs"
    yield (
        "Linears in a recipe",
        f"{summary['linears']} of {summary['linears_in_all']}",
        f"{coverage}, in {summary['recipe']}; {steps}",
    )
    if summary["loss_change"] is not None:
        detail = f"{summary['loss']:.6g} in the model's precision, {summary['loss_recipe']:.6g} in the recipe"
        yield "Loss change", f"{summary['loss_change']:+.3%}", detail
    if summary["snr_output_db"] is not None:
        yield "Model's output", f"{summary['snr_output_db']:.1f} dB", "SNR against the model's own precision"
    if summary["snr_gradients_db"] is not None:
        worst = next(iter(summary["gradients"].items()), None)
        detail = f"the worst: {worst[0]}, {worst[1]:.1f} dB" if worst and worst[1] is not None else "SNR of all of them"
        yield "Gradients", f"{summary['snr_gradients_db']:.1f} dB", detail
    if summary["worst_snr_db"] is not None:
        detail = f"{rows[0]['module']}; the median is {summary['median_snr_db']:.1f} dB"
        yield "Worst linear", f"{summary['worst_snr_db']:.1f} dB", detail


def _columns(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Those of `_SHOWN`, then the others; none that is empty in all rows."""
    fields = dict.fromkeys((*_SHOWN, *(field for row in rows for field in row)))
    known = [field for field in fields if any(row.get(field) not in (None, "") for row in rows)]
    return [
        {
            "field": field,
            "title": _SHOWN.get(field, field.replace("_", " ")),
            "form": _form(field, rows),
            "visible": field in _SHOWN,
            "frozen": field == "module",
        }
        for field in known
    ]


def _form(field: str, rows: Sequence[Mapping[str, Any]]) -> str:
    if not {type(row[field]) for row in rows} <= {int, float, type(None)}:  # True is an int too
        return "text"
    return "db" if field.endswith("_db") else "percent" if field.endswith(_SHARES) else "number"


def _plot(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """{"products", "dots": [{"x", "y", "product", "title"}], "lines": [{"y", "label"}]}, places in percent of the plot."""
    values = [row[f"snr_{product}_db"] for row in rows for product in _DRAWN if row[f"snr_{product}_db"] is not None]
    if not values:
        return {"products": [], "dots": [], "lines": []}
    step = 5 if max(values) - min(values) < 30 else 20
    low, high = math.floor(min(values) / step) * step, math.ceil(max(values) / step) * step or step
    high = max(high, low + step)

    def height(value: float) -> float:
        return round(_BOTTOM - (value - low) / (high - low) * (_BOTTOM - _TOP), 2)

    dots = [
        {
            "x": round(_LEFT + (place + 0.5) / len(rows) * (100 - _LEFT), 2),
            "y": height(row[f"snr_{product}_db"]),
            "product": product,
            "title": f"{row['module']}: {product} {row[f'snr_{product}_db']:.1f} dB",
        }
        for place, row in enumerate(rows)
        for product in _DRAWN
        if row[f"snr_{product}_db"] is not None
    ]
    lines = [{"y": height(value), "label": value} for value in range(low, high + 1, step)]
    return {"products": list(dict.fromkeys(dot["product"] for dot in dots)), "dots": dots, "lines": lines}


def _rules(rules: Sequence[tuple[str, Any]]) -> str:
    """As one writes them; "" without any."""
    lines = "".join(f"    ({json.dumps(pattern)}, {recipe!r}),\n" for pattern, recipe in rules)
    return f'options={{"rules": [\n{lines}]}}' if lines else ""
