"""Every kernel and every tile for each kind of GPU, compiled by benchmarks/targets.py: they fit, do not spill, multiply
FP8, and have the machine code that is recorded."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import triton

Importer = Callable[[str], ModuleType]

MULTIPLIES = {
    "l40s": {"mma.sync k32 e4m3"},
    "rtx5090": {"mma.sync k32 e4m3"},
    "h200": {"wgmma k32 e4m3"},
    "b200": {"tcgen05.mma f8f6f4"},
    "gb300": {"tcgen05.mma f8f6f4"},
    "thor": {"tcgen05.mma f8f6f4"},
}


SPILLS = {("sm_120a", "blocks 1x128 of any scale, rows and columns, ragged"): 296}
"""Bytes a thread, where there are any: docs/targets.md."""

DIFFER_BY_SEED = ("b200", "gb300", "thor")
"""Of them Triton writes one of several machine codes, of as many instructions, by Python's hash seed. They are compared again once
benchmarks/targets.py, which fixes the seed now, has recorded them."""

GROUPED_MXFP8 = {"", "tcgen05.mma mxf8f6f4", "wgmma k16 bf16", "mma.sync k16 bf16"}
"""Of experts in MXFP8: by tensor cores that apply scales of blocks, else in bf16."""


def check(name: str, importer: Importer, wanted: str = "") -> None:
    targets = importer("targets")
    rows = next(targets.compiled_apart([name], wanted)) if name in DIFFER_BY_SEED else targets.compiled(name, wanted)
    assert rows
    for row in rows:
        assert not row.error, row
        assert row.spills <= SPILLS.get((row.target, row.case), 0) and row.shared_kib <= row.most_kib, row
        assert row.most_kib <= targets.KINDS[name].shared_bytes / 1024, row
        assert row.multiplies in (GROUPED_MXFP8 if "MXFP8" in row.case else {"", *MULTIPLIES[name]}), row
    recorded = targets.recorded_in()
    if name not in DIFFER_BY_SEED and not targets.why_not_comparable(recorded, triton.__version__):
        assert targets.changed(recorded, name, rows, wanted) == [], "python benchmarks/targets.py records what is meant"


@pytest.mark.one_fast_case
@pytest.mark.parametrize("name", ["l40s", "b200", "rtx5090"])
def test_a_few_tiles(name: str, import_benchmark: Importer) -> None:
    check(name, import_benchmark, r"^fast 128x128x128 w8 s\d$|^current, rows and columns$|64x64x128.*grouped, .*wgrad$")


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("name", MULTIPLIES)
def test_everything(name: str, import_benchmark: Importer) -> None:
    check(name, import_benchmark)


@pytest.mark.slow
def test_fp8_is_multiplied_in_16_bits_on_sm_121(import_benchmark: Importer) -> None:
    """Once this fails, kernels/runtime/availability.py has an exception too many."""
    (row,) = import_benchmark("targets").compiled("gb10", r"^fast 128x128x128 w8 s\d$")
    assert row.multiplies == "mma.sync k16 f16"
