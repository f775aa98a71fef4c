"""All that the page shows, as plain data."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

from te_dynamo.inspect.explanation_text import gpu_name
from te_dynamo.inspect.page.graphs import stages_to_draw, te_bytes
from te_dynamo.inspect.page.head import head
from te_dynamo.inspect.page.modules import module_rows
from te_dynamo.inspect.page.numerics import numerics
from te_dynamo.report import in_one, without_numbers

if TYPE_CHECKING:
    from te_dynamo.inspect.explain import Explanation

_NO_CODE = 'Not known, as no code was generated: options={"codegen": "inductor"} or --codegen inductor does that, without a device.'

Card = tuple[str, str, str]
"""(title, value, detail)"""


def overview_data(explanation: Explanation) -> dict[str, Any]:
    """{"headline", "cards", "reasons"}: the tab Overview, and a notebook."""
    facts = explanation.to_dict()
    return {"headline": explanation.headline, "cards": _cards(explanation, facts), "reasons": _reasons(facts)}


def page_data(explanation: Explanation, comparison: Any = None) -> dict[str, Any]:
    """Those of `overview_data`, and {"head", "modules", "stages", "tables", "empty", "numerics"}; "empty" says why a table is, where that is not plain."""
    facts = explanation.to_dict()
    return {
        **overview_data(explanation),
        "head": head(explanation),
        "modules": module_rows([*explanation.linears, *explanation.norms_activations]),
        "stages": [] if explanation.graphs is None else stages_to_draw(explanation.graphs, _runs(facts)),
        "tables": {
            "Fusions": facts["fusions"],
            "What runs each operation": facts["lowered"],
            "Kept weights": facts["weights"],
            "Graph breaks": facts["graph_breaks"],
            "Notes": [{"note": note} for note in facts["notes"]],
        },
        "empty": {"What runs each operation": _NO_CODE} if any(row["matched"] for row in facts["linears"]) else {},
        "numerics": None if comparison is None else numerics(comparison),
    }


def _cards(explanation: Explanation, facts: dict[str, Any]) -> list[Card]:
    linears, others = facts["linears"], facts["norms_activations"]
    taken, share = sum(row["matched"] for row in linears), explanation.share_of_rows
    return [
        (
            "Linear FLOPs in a recipe",
            f"{facts['coverage'] * 100:.1f}%",
            f"{taken} of {len(linears)} linears, in {explanation.recipes}",
        ),
        (
            "Rows",
            f"{len(linears) + len(others)}",
            f"{len(linears)} linears, {len(others)} norms and activations{share and f'; they are {share}'}",
        ),
        *_work(explanation),
        *_time(explanation),
        (
            "Graphs",
            f"{facts['graphs']}",
            f"{len(facts['graph_breaks'])} graph breaks; {_kept(facts['weights'])}",
        ),
    ]


def _work(explanation: Explanation) -> list[Card]:
    graphs = explanation.graphs
    if graphs is None:
        return []
    phases = [phase for phase in ("forward", "backward", "inference") if phase in graphs]
    found = [te_bytes(graphs.graph(phase, i)) for phase in phases for i in range(len(graphs.all(phase)))]
    operations, nbytes = map(sum, zip(*found, strict=True)) if found else (0, 0)
    launches = sum(
        text.count("triton.") for phase in phases if f"lower.{phase}" in graphs for text in graphs.all(f"lower.{phase}")
    )
    kernels = (
        f"{launches} Triton launches of te_dynamo"
        if launches
        else "how many kernels is not known: none was compiled for a GPU here"
    )
    return [("te operations a step", f"{operations}", f"they read and write {_size(nbytes)}; {kernels}")]


def _time(explanation: Explanation) -> list[Card]:
    """Of a run without a GPU no time: that of another device beside what ran here would mislead."""
    if explanation.on_gpu is not None:
        hints = (explanation.on_h200, 'device="h200" or --device h200 gives the times')
        return [("On a GPU", "no device named", "; ".join(filter(None, hints)))]
    title = "Time of the linears, estimated"
    if not explanation.measured:
        title += ", never measured"
    if explanation.estimated_ms is None:
        return [(title, "not known", "no estimate for this GPU, precision or recipe")]
    bf16, ours = explanation.estimated_ms
    counted = f"{sum(bool(row.us) for row in explanation.linears)} of {len(explanation.linears)} linears; norms and all else are not counted"
    detail = f"{bf16:.2f} ms in the model's precision{_where(explanation)}, {bf16 / ours:.2f}x; {counted}"
    return [(title, f"{ours:.2f} ms", detail)]


def _where(explanation: Explanation) -> str:
    return f" on {gpu_name(explanation.device)}" if explanation.device else ""


def _reasons(facts: dict[str, Any]) -> list[dict[str, Any]]:
    """What was left, a row for the reasons that differ in their numbers alone, the largest first."""
    total = sum(row["flops"] for row in facts["linears"]) or 1
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in (*facts["linears"], *facts["norms_activations"]):
        if not row["matched"]:
            groups[without_numbers(row["reason"])].append(row)
    found = [
        {
            "reason": in_one(row["reason"] for row in rows),
            "rows": len(rows),
            "share": sum(row["flops"] for row in rows) / total,
            "kinds": ", ".join(f"{times} {kind}" for kind, times in Counter(row["kind"] for row in rows).items()),
            "first": rows[0]["module"] or rows[0]["source"],
        }
        for rows in groups.values()
    ]
    return sorted(found, key=lambda group: -group["share"])


def _kept(weights: list[dict[str, Any]]) -> str:
    nbytes = sum(weight["nbytes"] for weight in weights)
    return f"{_size(nbytes)} of quantized weights kept" if nbytes else "no quantized weight is kept"


def _runs(facts: dict[str, Any]) -> dict[tuple[str, str], str]:
    found: dict[tuple[str, str], list[str]] = defaultdict(list)
    for row in facts["lowered"]:
        found[row["phase"], row["op"]].append(row["runs"])
    return {key: " or ".join(runs) for key, runs in found.items()}


def _size(nbytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024 or unit == "GiB":
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    raise AssertionError
