"""benchmarks/gemm.py, grouped.py and quantize.py: the rows that they make of times, here of made-up ones."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from te_dynamo.kernels.runtime.target import TARGETS

NAN = float("nan")


def test_a_gemm_is_a_row_for_each_shape_and_way_of_scaling(
    import_benchmark: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    gemm = import_benchmark("gemm")
    tile = gemm.Problem.tiles[0]

    class Fake(gemm.Problem):
        def __init__(self, m: int, n: int, k: int) -> None:
            self.shape = (m, n, k)

        def chosen(self, kind: str) -> Any:
            return tile

        def tile(self, kind: str, tile: Any) -> Any:
            return lambda: None

        def cublas(self, kind: str) -> Any:
            return None if kind == "slow" else lambda: None

    milliseconds = {"bf16": 4.0, "fast cublas": 1.0}
    monkeypatch.setitem(gemm.FORMATS, "tensor", Fake)
    monkeypatch.setattr(gemm, "measure", lambda found, *_: {name: milliseconds.get(name, 2.0) for name in found})
    rows = gemm.sweep("tensor", [("up", 1000, 1000, 1000)], rounds=1, rep_ms=1, everything=False)
    name = gemm.short(tile)
    assert rows == [
        gemm.Row("up", "1000 x 1000 x 1000", "tensor fast", 1.0, 2.0, 0.5, name),
        gemm.Row("up", "1000 x 1000 x 1000", "tensor slow", 1.0, None, 0.5, name),
    ]


def test_a_sweep_times_every_tile_of_a_kind(
    import_benchmark: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tile of fast and one of slow accumulation may have one name."""
    gemm = import_benchmark("gemm")

    class Fake(gemm.Problem):
        def __init__(self, m: int, n: int, k: int) -> None:
            self.shape, self.target = (m, n, k), TARGETS["h200"]
            self.x = torch.empty(0)

        def tile(self, kind: str, tile: Any) -> Any:
            return (lambda: None) if tile.fast == (kind == "fast") else None

        def cublas(self, kind: str) -> Any:
            return None

    timed: list[str] = []
    monkeypatch.setitem(gemm.FORMATS, "tensor", Fake)
    monkeypatch.setattr(gemm, "target_of", lambda device: TARGETS["h200"])
    monkeypatch.setattr(gemm, "measure", lambda found, *_: timed.extend(found) or dict.fromkeys(found, 1.0))
    gemm.sweep("tensor", [("decode", 1, 14336, 4096)], rounds=1, rep_ms=1, everything=True)
    assert {"fast 64x128x128 w4 s5", "slow 64x128x128 w4 s5", "fast 128x128x128 w12 s6", "slow 128x128x128 w12 s6"} <= {
        *timed
    }


def test_a_grouped_gemm_that_fails_keeps_its_row(
    import_benchmark: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    grouped = import_benchmark("grouped")
    tile = grouped.GROUPED_TILES[0]

    class Fake(grouped.Problem):
        parts, x, sizes = ((0, 30), (30, 40)), torch.empty(0), (1000, 2, 1000, 1000)

        def __init__(self, *sizes: Any) -> None:
            pass

        def chosen(self, product: str, fast: bool) -> Any:
            return tile

        def tile(self, product: str, tile: Any) -> Any:
            return lambda: None

        def peers(self, product: str) -> dict[str, Any]:
            return {"bf16 loop": lambda: None}

        def specialized(self, fast: bool) -> Any:
            return lambda: None

    monkeypatch.setattr(grouped, "Problem", Fake)
    monkeypatch.setattr(grouped, "target_of", lambda device: TARGETS["h200"])
    monkeypatch.setattr(grouped, "measure", lambda found, *_: {name: NAN if "bf16" in name else 2.0 for name in found})
    arguments = SimpleNamespace(even=True, sweep=False, rounds=1, rep=1)
    rows = grouped.products([("few", 1000, 2, 1000, 1000)], arguments)
    title = "few: 1000 tokens, 2 experts (largest 30) of 1000 x 1000"
    assert rows[:2] == [
        grouped.Row(title, "rows", "bf16 loop", None, None),
        grouped.Row(title, "rows", f"{tile.name}*", 1.0, 2000.0),
    ]
    assert [row.product for row in rows] == ["rows"] * 2 + ["columns"] * 4


def test_a_quantizer_is_compared_with_a_copy(
    import_benchmark: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    quantize = import_benchmark("quantize")
    cases = [(name, lambda tile: tile, 1, 2, lambda: iter([(1, 2, 4)])) for name in ("row", "column")]
    monkeypatch.setitem(quantize.RECIPES, "mxfp8", lambda rows, columns: cases)
    monkeypatch.setattr(quantize, "milliseconds", lambda *_: 0.5)
    rows = quantize.measure("mxfp8", (1000, 1000), copy=16e9, only="col", sweeping=True)
    assert rows == [quantize.Row("mxfp8", "1000x1000", "column", 500.0, 0.008, 50.0)]
