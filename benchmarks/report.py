"""Measurements as JSON, and the Markdown that is written from them: `python benchmarks/report.py`.

`write` ends a benchmark: it makes `results/<name>-<device>.json` with the environment, the settings and one row a line. The
command writes `results/README.md` from all of these files, and fills the tables of README.md and docs/ between two lines:

    <!-- table: train_blocks-nvidia-h200 -->
    <!-- end -->

The name is one of `TABLES` and the device. `; column=value` after it keeps the rows that have that value, or one of several with ` | ` between
them, and may be repeated: `few_rows-nvidia-h200; mode=forward; case=4 linears 4096`.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import itertools
import json
import pathlib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

ROOT = pathlib.Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"

INTRO = """\
# Results

Written by `python benchmarks/report.py` from the JSON files of this folder; do not edit. Each benchmark has its newest run on each
device. A number has three digits here and all of its digits in the JSON. A row that is slower than bf16 stays.
"""

UNITS = {
    "db": "dB",
    "gpu": "GPU",
    "gb": "GB",
    "gib": "GiB",
    "kib": "KiB",
    "mb": "MB",
    "mib": "MiB",
    "tbps": "TB/s",
    "tflops": "TFLOP/s",
}

MARKED = re.compile(
    r"^(<!-- table: ([^;\n]+?)((?:; \w+=[^;\n]+?)*) -->\n)(.*?)^(?=<!-- end -->$)", re.MULTILINE | re.DOTALL
)


@dataclasses.dataclass(frozen=True)
class Table:
    """How the rows of a run are shown.

    Without `across`: a line for each row and a column for each field, or for those of `lines`, that has a value anywhere. With it: a line for each combination
    of the fields `lines` that have a value anywhere, a column for each value of the field `across`, and in a cell the fields `cells`, all but the first in
    brackets.
    """

    run: str
    lines: tuple[str, ...] = ()
    across: str = ""
    cells: tuple[str, ...] = ()


PARALLEL = {
    "": ("step_ms", "speedup", "peak_ratio"),
    "_overlap": ("compute_ms", "wire_alone_ms", "idle_ms", "enqueue_ms"),
}
"""Of train_parallel.py: the cells of each of its tables, by what the table's name ends with."""

TABLES = {
    "train_blocks": Table("train_blocks", ("block",), "provider", ("step_ms", "speedup")),
    "train_blocks_speedups": Table("train_blocks", ("block",), "provider", ("speedup",)),
    "train_blocks_memory": Table("train_blocks", ("block",), "provider", ("peak_mib", "peak_ratio")),
    "train_blocks_rows": Table("train_blocks"),
    "cpu_time": Table("cpu_time", ("block",), "provider", ("wall_ms", "speedup", "enqueue_ms", "kernels_ms")),
    "cpu_time_rows": Table("cpu_time"),
    "cpu_time_calls": Table("cpu_time_calls"),
    "train_models": Table("train_models", ("block",), "provider", ("step_ms", "speedup")),
    "train_low_memory": Table(
        "train_low_memory", ("block",), "provider", ("step_ms", "speedup", "peak_mib", "peak_ratio")
    ),
    "train_fused_producers": Table("train_fused_producers", ("block",), "provider", ("step_ms", "speedup")),
    **{
        f"{run}{ending}": Table(run, ("layout", "tokens"), "provider", cells)
        for run in itertools.starmap(
            "train_parallel_{}_{}gpus{}".format,
            itertools.product(("llama8b", "llama70b"), (2, 4), ("", "_2048")),
        )
        for ending, cells in PARALLEL.items()
    },
    "memory": Table("memory", ("block",), "provider", ("peak_mib", "step_ms")),
    "memory_rows": Table("memory"),
    "live_memory": Table(
        "live_memory", ("model", "graphs", "blocks", "tokens"), "provider", ("peak_mib", "peak_ratio")
    ),
    "inference": Table("inference", ("case", "tokens"), "provider", ("graph_us", "graph_speedup")),
    "inference_rows": Table("inference"),
    "checkpoint": Table("checkpoint", ("case", "tokens"), "provider", ("graph_us", "graph_speedup")),
    "checkpoint_rows": Table("checkpoint"),
    "checkpoint_lora": Table("checkpoint_lora"),
    "few_rows": Table(
        "few_rows", ("case", "mode", "rows", "bf16_us"), "recipe", ("te_speedup", "coverage", "all_speedup")
    ),
    "cost_borders": Table("cost_borders", ("linear", "gpu"), "how", ("rows",)),
    "step_profile": Table("step_profile"),
    "step_kernels": Table("step_kernels"),
    "compile_time": Table("compile_time"),
    "quantize": Table("quantize", ("recipe", "kernel"), "shape", ("percent_of_copy", "us")),
    "gemm": Table("gemm", ("product", "shape"), "scales", ("te_tflops", "cublas_tflops", "bf16_tflops")),
    "grouped": Table("grouped"),
    "coverage": Table("coverage", ("model", "in_recipe", "linears", "norms", "activations", "left")),
    "coverage_rows": Table("coverage"),
    "targets": Table("targets", ("kernel", "case"), "target", ("shared_kib", "registers", "spills")),
    "wire": Table("wire", ("layout", "ranks", "collective"), "recipe", ("kib", "ratio", "dtypes")),
    "encoder": Table("encoder", ("recipe", "output_db", "worst_linear_db", "embeddings_db", "top_1", "top_5")),
    "encoder_rows": Table("encoder"),
    "demo_losses": Table("demo_losses", ("recipe", "tokens_per_second"), "seed", ("training_loss", "training_change")),
    "demo_losses_validation": Table("demo_losses", ("recipe",), "seed", ("validation_loss", "validation_change")),
    "demo_losses_rows": Table("demo_losses"),
    "graph_traffic": Table("graph_traffic", ("model",), "fusions", ("gemms", "te", "others", "gib")),
}
"""Of all runs, in the order of the page."""


@dataclasses.dataclass(frozen=True)
class Run:
    """One results file: `<name>-<device>.json`, made by `benchmarks/<benchmark>.py`."""

    name: str
    benchmark: str
    environment: dict[str, str]
    settings: dict[str, Any]
    rows: list[dict[str, Any]]

    @property
    def device(self) -> str:
        """The device's name as part of a file name: "nvidia-h200"."""
        return "-".join(re.findall("[a-z0-9]+", self.environment["device"].lower()))


# --- what benchmarks call -------------------------------------------------------------------------------------


class _Quick(argparse.Action):
    """Writes no page's results file."""

    def __call__(self, parser: object, namespace: argparse.Namespace, *_: object) -> None:
        namespace.quick = True
        namespace.out = ROOT / "build" / "quick" if namespace.out == RESULTS else namespace.out


def parser(doc: str, quick: str = "") -> argparse.ArgumentParser:
    """A benchmark's command line, with the options that all have; quick: what --quick measures, where there is that option."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--out", type=pathlib.Path, default=RESULTS, help="folder of the results file")
    if quick:
        made.add_argument("--quick", action=_Quick, nargs=0, default=False, help=f"{quick}; results go to build/quick")
    return made


def split_choices(parser: argparse.ArgumentParser, args: argparse.Namespace, **known: Collection[str]) -> None:
    """Replaces each named field, words with commas between, by the list of its words; exits where one is not known."""
    for field, words in known.items():
        chosen = getattr(args, field).split(",")
        if unknown := set(chosen) - set(words):
            parser.error(f"unknown {field}: {', '.join(sorted(unknown))}; known: {', '.join(words)}")
        setattr(args, field, chosen)


def write(
    folder: pathlib.Path, benchmark: str, facts: dict[str, str], rows: Sequence[Any], name: str = "", **settings: Any
) -> None:
    """Writes the rows, dataclasses of one kind, and prints their tables.

    name: of the run, where a benchmark writes several; the benchmark's own without it.
    Raises ValueError without rows.
    """
    if not rows:
        raise ValueError(f"{benchmark}: nothing was measured; choose a case that exists")
    run = Run(name or benchmark, benchmark, facts, settings, [dataclasses.asdict(row) for row in rows])
    head = {"benchmark": benchmark, "environment": facts, "settings": settings, "columns": list(run.rows[0])}
    parts = [f" {json.dumps(key)}: {json.dumps(value)},\n" for key, value in head.items()]
    lines = ",\n".join(f"  {json.dumps(list(row.values()))}" for row in run.rows)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{run.name}-{run.device}.json"
    path.write_text(f'{{\n{"".join(parts)} "rows": [\n{lines}\n ]\n}}\n')
    print(*(text for _, text in _tables_of(run)), sep="\n")
    print(f"Wrote {path}" + "; `python benchmarks/report.py` writes the pages" * (folder == RESULTS))


def read(path: pathlib.Path) -> Run:
    """A file that `write` made."""
    held = json.loads(path.read_text())
    rows = [dict(zip(held["columns"], row, strict=True)) for row in held["rows"]]
    run = Run("", held["benchmark"], held["environment"], held["settings"], rows)
    return dataclasses.replace(run, name=path.stem.removesuffix(f"-{run.device}"))


# --- one table ------------------------------------------------------------------------------------------------


def table(rows: Sequence[Mapping[str, Any]], shown: Table) -> str:
    """The rows in Markdown. A failed row of a table with `across` reads "failed"; without it, it has a column with the error."""
    if not shown.across:
        columns = [
            column for column in shown.lines or rows[0] if any(row[column] not in (None, "", []) for row in rows)
        ]
        return _grid(map(_header, columns), ([row[column] for column in columns] for row in rows))
    lines = [column for column in shown.lines if any(row.get(column) is not None for row in rows)]
    across = list(dict.fromkeys(row[shown.across] for row in rows))
    found: dict[tuple[Any, ...], dict[str, str]] = {}
    for row in rows:
        found.setdefault(tuple(row[column] for column in lines), {})[row[shown.across]] = _joined(row, shown.cells)
    first, *others = map(_header, shown.cells)
    body = ([*key, *(cells.get(column) for column in across)] for key, cells in found.items())
    return f"Each cell: {_with(first, others)}.\n\n" + _grid([*map(_header, lines), *across], body)


def _grid(header: Iterable[str], body: Iterable[Iterable[Any]]) -> str:
    lines = [list(header), *([_cell(value) for value in line] for line in body)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _header(column: str) -> str:
    return " ".join(UNITS.get(word, word) for word in column.split("_"))


def _cell(value: Any) -> str:
    """Three digits of a float, but all before its point; a list's values with commas between."""
    if value is None:
        return ""
    if isinstance(value, list):
        return ", ".join(map(_cell, value))
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 99.95 else f"{value:#.3g}" if abs(value) >= 0.9995 else f"{value:.3g}"
    return str(value).replace("|", "\\|")


def _joined(row: Mapping[str, Any], columns: Sequence[str]) -> str:
    if row.get("error"):
        return "failed"
    first, *others = (_cell(row.get(column)) or "-" for column in columns)
    return _with(first, others)


def _with(first: str, others: list[str]) -> str:
    return f"{first} ({', '.join(others)})" if others else first


# --- pages ----------------------------------------------------------------------------------------------------


def pages(root: pathlib.Path = ROOT) -> dict[pathlib.Path, str]:
    """{path: text} of all that is written from the results: their page, README.md and docs/.

    Raises ValueError for a run that no table shows, and for a marked table that is unknown, is empty or has no end.
    """
    results = root / "benchmarks" / "results"
    runs = [read(path) for path in sorted(results.glob("*.json"))]
    known = {
        f"{name}-{run.device}": (run, shown) for run in runs for name, shown in TABLES.items() if shown.run == run.name
    }
    if unseen := {run.name for run in runs} - {shown.run for shown in TABLES.values()}:
        raise ValueError(f"no table of benchmarks/report.py shows {', '.join(sorted(unseen))}: add it to TABLES")
    texts = {path: _filled(path, known) for path in (root / "README.md", *sorted((root / "docs").rglob("*.md")))}
    return {results / "README.md": _page(runs), **texts}


def _page(runs: list[Run]) -> str:
    parts = [INTRO]
    order = list(dict.fromkeys(shown.run for shown in TABLES.values()))
    by_benchmark: dict[str, list[Run]] = {}
    for run in sorted(runs, key=lambda run: order.index(run.name)):
        by_benchmark.setdefault(run.benchmark, []).append(run)
    for benchmark, its_runs in by_benchmark.items():
        source = (ROOT / "benchmarks" / f"{benchmark}.py").read_text()
        parts.append(f"## {benchmark}\n\n{ast.get_docstring(ast.parse(source))}\n")
        for run in its_runs:
            file = f"{run.name}-{run.device}.json"
            facts = [f"{k} {v}" for k, v in {**run.environment, **run.settings}.items() if k != "device"]
            parts.append(f"### {run.name}, {run.environment['device']}\n\n[{file}]({file}): {', '.join(facts)}.\n")
            parts += [f"`{name}`\n\n{text}" for name, text in _tables_of(run)]
    return "\n".join(parts)


def _tables_of(run: Run) -> list[tuple[str, str]]:
    return [(f"{name}-{run.device}", table(run.rows, shown)) for name, shown in TABLES.items() if shown.run == run.name]


def _filled(path: pathlib.Path, known: dict[str, tuple[Run, Table]]) -> str:
    """The file's text with its marked tables as they are now."""

    def fill(match: re.Match[str]) -> str:
        opening, name, choices, _ = match.groups()
        if name not in known:
            raise ValueError(f"{path}: no table {name!r}; there are {', '.join(known)}")
        run, shown = known[name]
        rows = run.rows
        for choice in choices.split("; ")[1:]:
            column, chosen = choice.split("=", 1)
            values = chosen.split(" | ")
            rows = [
                {k: v for k, v in row.items() if k != column or column == shown.across or len(values) > 1}
                for row in rows
                if str(row.get(column)) in values
            ]
        if not rows:
            raise ValueError(f"{path}: table {name!r} has no row with{choices.replace(';', ',')[1:]}")
        return f"{opening}\n{table(rows, shown)}\n"

    text = path.read_text()
    made, count = MARKED.subn(fill, text)
    if count != len(re.findall("^<!-- table:", text, re.MULTILINE)):
        raise ValueError(f"{path}: a table is not of the form '<!-- table: NAME -->', lines, '<!-- end -->'")
    return made


def main() -> None:
    for path, text in pages().items():
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
            print(f"Wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
