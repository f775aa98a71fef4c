"""The tree of modules: a row for each module that holds a linear, a norm or an activation; equal layers are one row.

    model                        225 of 225 linears
      layers 0-31, alike (32)    224 of 224
        self_attn                128 of 128
          q_proj                  32 of 32            8192 x 4096 x 4096   float8_current_scaling

A row is a dictionary: name, path, kind, shape, dtype, state ("recipe", "left", or "" without rows of its own), runs, reason, source,
flops, covered (FLOPs in a recipe), linears, taken (linears in a recipe), left (rows that are left), and rows, the children. Sums of a
folded row are those of all its layers, in the rows below it too: children add up to their parents.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from te_dynamo.report import MatchRecord

_SUMS = ("flops", "covered", "linears", "taken", "left")


@dataclasses.dataclass
class _Module:
    records: list[MatchRecord] = dataclasses.field(default_factory=list)
    children: dict[str, _Module] = dataclasses.field(default_factory=dict)


def module_rows(records: Iterable[MatchRecord]) -> list[dict[str, Any]]:
    """The rows of the top of the tree."""
    root = _Module()
    for record in records:
        module = root
        for part in record.module.split(".") if record.module else ():
            module = module.children.setdefault(part, _Module())
        module.records.append(record)
    return _rows_in(root, "")


def _rows_in(module: _Module, path: str) -> list[dict[str, Any]]:
    own = [_leaf(record.kind, record) for record in module.records]
    children = [_row(name, child, f"{path}.{name}" if path else name) for name, child in module.children.items()]
    return own + list(_folded(children))


def _row(name: str, module: _Module, path: str) -> dict[str, Any]:
    if len(module.records) == 1 and not module.children:
        return _leaf(name, module.records[0])
    if len(module.children) == 1 and not module.records:  # a module that only wraps another
        ((inner, child),) = module.children.items()
        return _row(f"{name}.{inner}", child, f"{path}.{inner}")
    rows = _rows_in(module, path)
    sums = {key: sum(row[key] for row in rows) for key in _SUMS}
    empty = dict.fromkeys(("kind", "shape", "dtype", "state", "runs", "reason", "source"), "")
    return {"name": name, "path": path, **empty, **sums, "rows": rows}


def _leaf(name: str, record: MatchRecord) -> dict[str, Any]:
    linear = record.kind == "linear"
    return {
        "name": name,
        "path": record.module,
        "kind": record.kind,
        "shape": " x ".join(record.shape) + (f" in {record.groups} groups" if record.groups else ""),
        "dtype": record.dtype,
        "state": "recipe" if record.matched else "left",
        "runs": _runs(record),
        "reason": record.reason,
        "source": record.source,
        "flops": record.flops,
        "covered": record.flops if record.matched else 0,
        "linears": int(linear),
        "taken": int(linear and record.matched),
        "left": int(not record.matched),
        "rows": [],
    }


def _folded(rows: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Neighbours whose names differ in their numbers alone, and that are equal below, as one row."""
    for _, alike in itertools.groupby(rows, key=_what_is_equal):
        group = list(alike)
        if len(group) == 1:
            yield group[0]
            continue
        first = group[0]
        name = f"{_range(first['name'], group[-1]['name'])}, alike ({len(group)})"
        yield {**_times(first, len(group)), "name": name, "count": len(group)}


def _times(row: dict[str, Any], count: int) -> dict[str, Any]:
    """The sums of `count` such rows."""
    return {**row, **{key: row[key] * count for key in _SUMS}, "rows": [_times(child, count) for child in row["rows"]]}


def _range(first: str, last: str) -> str:
    """ "0-3.fc" of "0.fc" and "3.fc"."""
    numbers = iter(re.findall(r"\d+", last))
    return re.sub(r"\d+", lambda found: found[0] if (end := next(numbers)) == found[0] else f"{found[0]}-{end}", first)


def _what_is_equal(row: dict[str, Any]) -> Any:
    name = row["name"]
    if not re.search(r"\d", name):
        return name
    return re.sub(r"\d+", "#", name), _below(row)


def _below(row: dict[str, Any]) -> Any:
    """All that a row shows but its own path and name."""
    own = tuple(value for key, value in row.items() if key not in ("name", "path", "rows"))
    return own, tuple((child["name"], _below(child)) for child in row["rows"])


def _runs(record: MatchRecord) -> str:
    if not record.matched:
        return f"{record.dtype} (left)".strip()
    stored = f", weight as stored: {record.stored}" if record.stored else ""
    return (record.recipe or f"te.{record.kind}") + stored
