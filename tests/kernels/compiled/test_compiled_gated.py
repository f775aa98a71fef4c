"""The kernels of gated units, compiled for every kind of gate and for both targets: none spills."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from helpers.kernels.compiled_quantize import source
from helpers.slow import EXHAUSTIVE

from te_dynamo.kernels.activation import gated, gated_in_place
from te_dynamo.kernels.produce import tensor, tensor_kernels
from te_dynamo.kernels.quantize.current import PARTIALS, Tile, amax_tile
from te_dynamo.kernels.runtime.compiled_code import compile_for

INTEGERS = {"M", "K", "a_stride", "b_stride", "c_stride", "gate_stride", "up_stride"}
ALIGNED = INTEGERS - {"M"}
CODES = {f"{name}{part}" for name in ("", "second_") for part in ("data", "transpose")}
FP32 = {"partials", "second_partials", "gate_partials", "up_partials", "scale_inv", "second_scale_inv"}
CAST = {"FMAX": 448.0, "EPS": 0.0, "POWER_OF_TWO": False, "PARTIALS": PARTIALS}
COLUMNS = 14336

FEWER_REGISTERS = ("relu", "sigmoid", "identity")
"""Kinds whose gradient has less to keep than the others'."""

Case = tuple[Any, dict[str, Any], int]


def tiled(kernel: Any, tile: Tile, **constants: Any) -> Case:
    return kernel, {**constants, "BLOCK_M": tile[0], "BLOCK_K": tile[1]}, tile[2]


def cases(columnwise: bool, kind: str) -> Iterator[Case]:
    """Each kernel as training launches it, and with what it may write besides."""
    for which in ("known", "guess", "mend"):
        yield from casts(columnwise, which, kind)
    if columnwise:
        return
    for name, together in (("gated", False), ("gated_backward", False), ("gated_backward", True)):
        flags = {**source(name, kind), "TOGETHER": together, "PARTS": 0}
        yield tiled(tensor_kernels.produce_amax_kernel, amax_tile(COLUMNS), **flags)
    block, warps = gated_in_place.row_block(COLUMNS)
    row = {"KIND": kind, "E5M2": False, "QUARTER": COLUMNS // 4, "BLOCK_K": block, **CAST}
    for half in (-1, 1):
        yield gated_in_place.gated_backward_rows_kernel, {**row, "GATE_HALF": half}, warps


def casts(columnwise: bool, which: str, kind: str) -> Iterator[Case]:
    """Those that write codes, in that pass."""
    usage = {"KEEP_OUTPUT": which != "mend", "ROWWISE": True, "COLUMNWISE": columnwise, "PASS": which, **CAST}
    if which != "known":
        usage |= {"POWER_OF_TWO": True, "PARTIALS": 2048}
    shapes = (
        ("gated", False, -1),
        ("gated_backward", False, -1),
        ("gated_backward", True, -1),
        ("gated_backward", False, 1),
    )
    for name, stacked, half in shapes:
        tile = tensor.write_tile(name, 2, (8192, COLUMNS), columnwise, True, which != "known")
        flags = {**source(name, kind), "PARTS": 0, "EARLY": False, "STACKED": stacked, "HALF": half}
        yield tiled(tensor_kernels.produce_write_kernel, tile, **flags, **usage)


def type_of(argument: str) -> str:
    if argument in INTEGERS:
        return "i32"
    if argument == "hint":
        return "*i64"
    return "*fp32" if argument in FP32 else "*fp8e4nv" if argument in CODES else "*bf16"


@pytest.mark.slow
@pytest.mark.parametrize("capability", [90, pytest.param(100, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("columnwise", [False, True])
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=EXHAUSTIVE) if kind in FEWER_REGISTERS else kind for kind in gated.KINDS]
)
def test_no_kind_spills(kind: str, columnwise: bool, capability: int) -> None:
    for kernel, constants, warps in cases(columnwise, kind):
        arguments = {name: type_of(name) for name in kernel.arg_names if name not in constants}
        aligned = [name for name, kind in arguments.items() if kind.startswith("*") or name in ALIGNED]
        report = compile_for(kernel, arguments, constants, aligned=aligned, capability=capability, num_warps=warps)
        assert report.spills == 0, (kernel.__name__, constants, report.log)
