"""An explanation as text: the headline, the tree of modules with equal layers once, each reason once, then the smaller tables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType

from te_dynamo.inspect.tables import FittedTable, paragraph
from te_dynamo.kernels.runtime.target import TARGETS
from te_dynamo.report import WorkspaceRecord, in_one, without_numbers

if TYPE_CHECKING:
    from te_dynamo.inspect.explain import Explanation


def gpu_name(device: str) -> str:
    """What a sentence calls one of `TARGETS`."""
    return f"an NVIDIA {TARGETS[device].name}"


def of_slower(sizes: Sequence[str]) -> list[str]:
    """One note on the products of `Report.slower_than_cublaslt`; none without any."""
    if not sizes:
        return []
    listed = ", ".join(sizes[:3]) + (f" and {len(sizes) - 3} more" if len(sizes) > 3 else "")
    return [
        f"on an H200 cuBLASLt took 0.59 to 0.97 of the time for GEMMs with scales of blocks of such sizes: {listed}. "
        'mode="max-autotune" times them, and takes it where it is faster and takes longer than the CPU does to call it'
    ]


def parts_of(explanation: Explanation) -> Iterator[RenderableType]:
    """What `text_of` prints below each other."""
    from te_dynamo.inspect.page.modules import module_rows  # the page's folder loads Jinja2

    facts = explanation.to_dict()
    yield paragraph(explanation.headline)
    reasons: dict[str, list[str]] = {}
    columns = ("module", "M x N x K", "dtype", "runs", "source")
    tree = [*_tree(module_rows([*explanation.linears, *explanation.norms_activations]), reasons)]
    yield from _table("modules", columns, tree, optional=("dtype", "source", "M x N x K"))
    yield from _table("fusions", ("phase", "fusion", "count"), map(_values, facts["fusions"]))
    yield from _table("lowered", ("phase", "te op", "runs", "count"), _lowered(facts["lowered"], reasons))
    kept = map(_weight_row, explanation.kept_weights)
    yield from _table("quantized weights", ("weight", "held as", "MiB", "kept"), kept, optional=("MiB",))
    yield from _table("graph breaks", ("source", "reason"), map(_values, facts["graph_breaks"]))
    if reasons:
        yield "\nreasons\n"
    for number, alike in enumerate(reasons.values(), 1):
        yield paragraph(f"({number}) {in_one(alike)}", indent=5)
    for note in facts["notes"]:
        yield paragraph(f"\nnote: {note}")


def _table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[Any]],
    optional: Sequence[str] = (),
) -> Iterator[RenderableType]:
    rows = list(rows)
    if rows:
        yield ""
        yield FittedTable(title, columns, rows, optional)


def _tree(rows: Sequence[dict[str, Any]], reasons: dict[str, list[str]], depth: int = 0) -> Iterator[tuple[str, ...]]:
    """A row for each module, its name behind two blanks for each module around it. Fills `reasons`: those with one number."""
    for row in rows:
        runs = row["runs"] if row["state"] else f"{row['taken']} of {row['linears']}" if row["linears"] else ""
        if row["state"] == "left":
            runs = f"{'' if row['kind'] == 'linear' else row['kind'] + ' '}left {_number(row['reason'], reasons)}"
        yield f"{'  ' * depth}{row['name']}", row["shape"], row["dtype"], runs, row["source"]
        yield from _tree(row["rows"], reasons, depth + 1)


def _lowered(rows: Sequence[dict[str, Any]], reasons: dict[str, list[str]]) -> Iterator[tuple[Any, ...]]:
    for row in rows:
        runs, because, reason = row["runs"].partition(" (")
        if because:
            runs = f"{runs} {_number(reason.removesuffix(')'), reasons)}"
        yield row["phase"], row["op"], runs, row["count"]


def _number(reason: str, reasons: dict[str, list[str]]) -> str:
    """ "(2)", under which the reason and those that differ in their numbers alone are printed once."""
    reasons.setdefault(alike := without_numbers(reason), []).append(reason)
    return f"({[*reasons].index(alike) + 1})"


def _values(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row.values())


def _weight_row(weight: WorkspaceRecord) -> tuple[str, ...]:
    return weight.weight, weight.quantizer, f"{weight.nbytes / 2**20:.2f}", weight.kept
