"""benchmarks/report.py: results as JSON, the tables that are made from them, and that the repository's Markdown has these."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest


@dataclasses.dataclass
class Row:
    block: str
    provider: str
    step_ms: float | None = None
    speedup: float | None = None
    peak_mib: float | None = None
    peak_ratio: float | None = None
    error: str = ""


FACTS = {"device": "NVIDIA H200", "torch": "2", "commit": "abc"}
ROWS = [
    Row("small", "bf16", 1234.5, 1.0),
    Row("small", "te", 0.0123456, 0.5),
    Row("large", "bf16", 99.96, 1.0),
    Row("large", "te", error="no such kernel | none"),
]


@pytest.fixture
def report(import_benchmark: Callable[[str], ModuleType]) -> ModuleType:
    return import_benchmark("report")


@pytest.fixture
def checkout(report: ModuleType, tmp_path: Path) -> Path:
    """A folder with one run and a README.md."""
    report.write(tmp_path / "benchmarks" / "results", "train_blocks", FACTS, ROWS, rounds=3)
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text("nothing")
    return tmp_path


def test_markdown_is_what_the_results_give(report: ModuleType) -> None:
    differs = [path.name for path, text in report.pages().items() if not path.exists() or path.read_text() != text]
    assert not differs, "run `python benchmarks/report.py`"


def test_one_newest_run_of_a_benchmark_on_a_device(report: ModuleType) -> None:
    files = sorted(report.RESULTS.iterdir())
    assert {path.suffix for path in files if path.name != "README.md"} == {".json"}
    for path in files:
        if path.suffix == ".json":
            run = report.read(path)
            assert path.stem == f"{run.name}-{run.device}" and run.rows
            assert {"device", "driver", "torch", "triton", "commit", "date"} <= set(run.environment), path.name


def test_what_is_written_is_read(report: ModuleType, checkout: Path) -> None:
    (path,) = (checkout / "benchmarks" / "results").iterdir()
    assert path.name == "train_blocks-nvidia-h200.json"
    run = report.read(path)
    assert (run.name, run.benchmark, run.environment) == ("train_blocks", "train_blocks", FACTS)
    assert run.settings == {"rounds": 3} and run.rows == [dataclasses.asdict(row) for row in ROWS]
    assert '\n  ["small", "te", 0.0123456, 0.5, null, null, ""],\n' in path.read_text(), "a line a row"


def test_a_quick_run_leaves_the_results_alone(report: ModuleType) -> None:
    parser, elsewhere = report.parser("A benchmark.", quick="little"), Path("elsewhere")
    chosen = [
        parser.parse_args(words)
        for words in ([], ["--quick"], ["--quick", "--out", "elsewhere"], ["--out", "elsewhere", "--quick"])
    ]
    assert [(args.quick, args.out) for args in chosen] == [
        (False, report.RESULTS),
        (True, report.ROOT / "build" / "quick"),
        (True, elsewhere),
        (True, elsewhere),
    ]


def test_no_rows_are_an_error(report: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="gemm: nothing was measured"):
        report.write(tmp_path, "gemm", FACTS, [])


def test_all_rows_with_the_fields_that_have_a_value(report: ModuleType) -> None:
    rows = [
        {"name": "a|b", "peak_mib": 99.96, "us": [0.5, 2], "none": None},
        {"name": "c", "peak_mib": 0.012, "us": [], "none": None},
    ]
    assert report.table(rows, report.Table("run")).splitlines() == [
        "| name | peak MiB | us |",
        "| --- | --- | --- |",
        "| a\\|b | 100 | 0.5, 2 |",
        "| c | 0.012 |  |",
    ]


def test_a_table_of_providers_keeps_what_failed(report: ModuleType) -> None:
    rows = [dataclasses.asdict(row) for row in ROWS]
    shown = report.Table("train_blocks", ("block",), "provider", ("step_ms", "speedup"))
    assert report.table(rows, shown).splitlines() == [
        "Each cell: step ms (speedup).",
        "",
        "| block | bf16 | te |",
        "| --- | --- | --- |",
        "| small | 1234 (1.00) | 0.0123 (0.5) |",
        "| large | 100 (1.00) | failed |",
    ]
    assert report.table(rows, dataclasses.replace(shown, cells=("speedup",))).startswith("Each cell: speedup.\n")
    empty = [row | {"speed": None} for row in rows]
    assert report.table(empty, dataclasses.replace(shown, lines=("block", "speed"))) == report.table(rows, shown)
    assert report.table(rows, report.Table("train_blocks")).splitlines()[-1].endswith("| no such kernel \\| none |")


def test_a_page_has_a_table_between_its_marks(report: ModuleType, checkout: Path) -> None:
    page = checkout / "docs" / "page.md"
    text = "before `<!-- table: NAME -->`\n<!-- table: {} -->\n{}<!-- end -->\nafter\n"
    page.write_text(text.format("train_blocks_rows-nvidia-h200; block=small; provider=te", "old\n"))
    table = "| step ms | speedup |\n| --- | --- |\n| 0.0123 | 0.5 |\n"
    filled = text.format("train_blocks_rows-nvidia-h200; block=small; provider=te", f"\n{table}\n")
    assert report.pages(checkout)[page] == filled
    page.write_text(filled)
    assert report.pages(checkout)[page] == filled, "twice is once"
    page.write_text(text.format("train_blocks_rows-nvidia-h200; block=small | large; provider=te", ""))
    assert "| small |" in report.pages(checkout)[page] and "| large |" in report.pages(checkout)[page]
    results = report.pages(checkout)[checkout / "benchmarks" / "results" / "README.md"]
    assert "torch 2, commit abc, rounds 3" in results and "| large | 100 (1.00) | failed |" in results


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "<!-- table: gemm-nvidia-h200 -->\n<!-- end -->\n",
            "no table 'gemm-nvidia-h200'; there are train_blocks-nvidia",
        ),
        ("<!-- table: train_blocks-nvidia-h200; block=tiny -->\n<!-- end -->\n", "has no row with block=tiny"),
        ("<!-- table: train_blocks-nvidia-h200 -->\n", "is not of the form"),
    ],
)
def test_a_mark_that_cannot_be_filled_is_named(report: ModuleType, checkout: Path, text: str, message: str) -> None:
    (checkout / "README.md").write_text(text)
    with pytest.raises(ValueError, match=message):
        report.pages(checkout)


def test_a_run_that_no_table_shows_is_named(report: ModuleType, checkout: Path) -> None:
    results = checkout / "benchmarks" / "results"
    shutil.copy(results / "train_blocks-nvidia-h200.json", results / "new-nvidia-h200.json")
    with pytest.raises(ValueError, match="shows new: add it"):
        report.pages(checkout)
