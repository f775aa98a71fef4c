"""benchmarks/machine_code.py, and with benchmarks/targets.py the code of some kernels against the recorded table."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import triton
import triton.language as tl

from te_dynamo.kernels.runtime.compiled_code import compile_for

Importer = Callable[[str], ModuleType]


@triton.jit
def scale_kernel(x, y, N, factor, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(x + i, mask=i < N) * factor, mask=i < N)


@triton.jit
def renamed_kernel(factor, target, unread, source, N, BLOCK: tl.constexpr):

    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + i, tl.load(source + i, mask=i < N) * factor, mask=i < N)


@triton.jit
def other_kernel(x, y, N, factor, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(x + i, mask=i < N) + factor, mask=i < N)


def test_names_lines_and_places_of_arguments_are_no_difference(import_benchmark: Importer) -> None:
    code_of = import_benchmark("machine_code").code_of
    types = {"x": "*fp32", "y": "*fp32", "N": "i32", "factor": "fp32"}
    turned = {"factor": "fp32", "target": "*fp32", "unread": "*fp32", "source": "*fp32", "N": "i32"}
    first, second, third = (
        code_of(compile_for(kernel, given, {"BLOCK": 128}).cubin)
        for kernel, given in ((scale_kernel, types), (renamed_kernel, turned), (other_kernel, types))
    )
    assert first == second and first.instructions > 10
    assert first.code != third.code


def test_changes_name_the_case_and_what_its_code_was(import_benchmark: Importer) -> None:
    def row(case: str, code: str, kernel: str = "gemm_kernel", **others: Any) -> dict[str, Any]:
        facts = {"target": "sm_90a", "registers": 64, "spills": 0, "instructions": 100, "shared_kib": 16.0}
        return {"case": case, "code": code, "kernel": kernel, **facts, **others}

    before = [row("same", "a"), row("other", "b"), row("gone", "c")]
    after = [row("same", "a", "product_kernel"), row("other", "d", registers=70), row("new", "e")]
    assert import_benchmark("machine_code").changes(before, after) == [
        "sm_90a other: gemm_kernel b (100 instructions, 64 registers, 0 bytes spilled, 16 KiB)"
        " -> gemm_kernel d (100 instructions, 70 registers, 0 bytes spilled, 16 KiB)",
        "sm_90a gone: gemm_kernel c (100 instructions, 64 registers, 0 bytes spilled, 16 KiB) -> none",
        "sm_90a new: none -> gemm_kernel e (100 instructions, 64 registers, 0 bytes spilled, 16 KiB)",
    ]
