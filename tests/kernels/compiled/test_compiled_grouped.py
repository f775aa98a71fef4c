"""Machine code of the grouped kernels, compiled without a GPU: tensor cores, no spills, no warnings, the arguments written."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers.kernels.compiled_cases import (
    SPILLS_UNDER_TRITON_3_9,
    TRITON_TYPES,
    Case,
    check_machine_code,
    written,
)

from te_dynamo.kernels.gemm.grouped_product import gemm_grouped_kernel
from te_dynamo.kernels.gemm.multiply import grouped_options
from te_dynamo.kernels.gemm.tiles import GROUPED_TILES, Tile

MIXES = {
    "e4m3.e4m3": ("*fp8e4nv", "*fp8e4nv"),
    "e5m2.e4m3": ("*fp8e5", "*fp8e4nv"),
    "e4m3.e5m2": ("*fp8e4nv", "*fp8e5"),
}


def gemm_case(
    tile: Tile, columns: bool, mix: str, out_dtype: torch.dtype, width: int = 4096, capability: int = 90
) -> Case:
    a, b = MIXES[mix]
    aligned = ("a", "a_scale_inv", "b", "b_scale_inv", "offs", "c") + (("M", "K") if columns else ("K",))
    aligned += ("N",) if width % 16 == 0 else ()
    name = "columns" if columns else "rows"
    return Case(
        name=f"gemm_grouped {name} {tile.name} {mix} {out_dtype} {width} sm_{capability}",
        kernel=gemm_grouped_kernel,
        args={
            **{
                "a": a,
                "a_scale_inv": "*fp32",
                "b": b,
                "b_scale_inv": "*fp32",
                "offs": "*i32",
                "c": TRITON_TYPES[out_dtype],
            },
            **{"M": "i32", "N": "i32", "K": "i32", "G": "i32"},
        },
        constants=grouped_options(tile, width, 64, "tensor", columns),
        aligned=aligned,
        has=(f".f32.{mix}", "wgmma.mma_async", "cp.async.bulk.tensor") if capability == 90 else ("tcgen05.mma",),
        lacks=("fma.",),
        writes=("c",),
        capability=capability,
        programs_per_sm=tile.ctas_per_sm,
    )


def cases() -> Iterator[Case]:
    for tile in GROUPED_TILES:
        for columns in (False, True):
            yield gemm_case(tile, columns, "e4m3.e4m3" if tile.fast else "e5m2.e4m3", torch.bfloat16)
    small = GROUPED_TILES[-1]
    yield gemm_case(small, True, "e4m3.e5m2", torch.float32)
    yield gemm_case(small, False, "e5m2.e4m3", torch.float16, width=4095)
    for columns, size in ((False, "M"), (True, "K")):  # of as many tokens as data says
        counted = gemm_case(small, columns, "e4m3.e4m3", torch.bfloat16)
        yield dataclasses.replace(counted, name=f"{counted.name} {size} i64", args={**counted.args, size: "i64"})
    for tile in (GROUPED_TILES[0], small):
        for columns in (False, True):
            yield gemm_case(tile, columns, "e4m3.e4m3", torch.bfloat16, capability=100)


CASES = list(cases())
FAST = (f"columns {GROUPED_TILES[0].name}", f"rows {GROUPED_TILES[2].name}")
"""What is compiled in every run: one tile of each product."""

SPILLS = f"gemm_grouped columns {GROUPED_TILES[0].name} e4m3.e4m3 torch.bfloat16 4096 sm_90"


def marked(cases: list[Case]) -> list[Any]:
    """The cases; those of the other tiles are slow tests."""
    always = [case.capability == 90 and any(name in case.name for name in FAST) for case in cases]
    return [
        case if now else pytest.param(case, marks=pytest.mark.slow) for case, now in zip(cases, always, strict=True)
    ]


@pytest.mark.one_fast_case
@pytest.mark.parametrize("case", marked(CASES), ids=lambda case: case.name)
def test_machine_code(case: Case, request: pytest.FixtureRequest) -> None:
    if case.name == SPILLS:
        request.applymarker(SPILLS_UNDER_TRITON_3_9)
    check_machine_code(case)


@pytest.mark.parametrize("case", marked([case for case in CASES if case.capability == 90]), ids=lambda case: case.name)
def test_torch_sees_what_the_kernel_writes(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    assert written(case, monkeypatch) == case.writes
