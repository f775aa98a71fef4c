"""Kernels compiled without a GPU: a case is a kernel with its dtypes and constants."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import triton
from helpers.oracles.fp8_merges import check_merges
from torch._higher_order_ops.triton_kernel_wrap import get_mutated_tensors, kernel_side_table
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.backends.compiler import GPUTarget

from te_dynamo.kernels.gemm.specialized.product import gemm_specialized_kernel, specialized_options
from te_dynamo.kernels.runtime.compiled_code import PtxReport, compile_for

SPILLS_UNDER_TRITON_3_9 = pytest.mark.xfail(
    tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9), strict=True, reason="8 to 24 bytes; docs/targets.md"
)
"""Of a kernel that the compiler of 3.7 finds registers for."""

SHARED_BYTES = 227 * 1024

TORCH_DTYPES = {
    "*fp8e4nv": torch.float8_e4m3fn,
    "*fp8e5": torch.float8_e5m2,
    "*bf16": torch.bfloat16,
    "*fp16": torch.float16,
    "*fp32": torch.float32,
    "*u8": torch.uint8,
    "*i32": torch.int32,
}

TRITON_TYPES = {dtype: kind for kind, dtype in TORCH_DTYPES.items()}


@dataclasses.dataclass(frozen=True)
class Case:
    """One specialization of one kernel, what its code must and must not contain, and the arguments it writes."""

    name: str
    kernel: Any
    args: Mapping[str, str]
    constants: Mapping[str, Any]
    aligned: tuple[str, ...]
    has: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    capability: int = 90
    programs_per_sm: int = 1


def padded_order_arguments(groups: int) -> tuple[dict[str, str], dict[str, Any]]:
    """(types, constants) of a quantizing kernel's arguments for x as it is, or in the padded order of so many groups."""
    if groups:
        return {"offs": "*i32", "x_rows": "i32", "G": "i32"}, {"GROUPS": groups}
    return {}, {"offs": None, "x_rows": 1, "G": 1, "GROUPS": 0}


MIXES = {
    "e4m3.e4m3": ("*fp8e4nv", "*fp8e4nv"),
    "e5m2.e4m3": ("*fp8e5", "*fp8e4nv"),
    "e4m3.e5m2": ("*fp8e4nv", "*fp8e5"),
}


def compile_case(case: Case) -> PtxReport:
    """What becomes of a case; several tests of one read one compilation."""
    constants = tuple(case.constants.items())
    types = tuple(type(value) for _, value in constants)  # 1, 1.0 and True are equal, and compile to different code
    return _compiled(case.kernel, tuple(case.args.items()), constants, types, case.aligned, case.capability)


def check_machine_code(case: Case, shared_bytes: int = SHARED_BYTES) -> PtxReport:
    """No spill, no warning, shared memory for all of its programs on a multiprocessor, what it must contain, and nothing that it must not."""
    report = compile_case(case)
    assert report.spills == 0 and report.warnings == (), report.log
    assert report.shared <= shared_bytes // case.programs_per_sm
    for text in case.has:
        assert text in report.ptx, text
    for text in case.lacks:
        assert text not in report.ptx, text
    return report


@functools.cache
def _compiled(kernel: Any, args: Any, items: Any, _: Any, aligned: tuple[str, ...], capability: int) -> PtxReport:
    constants = dict(items)
    options = {name: constants.pop(name) for name in ("num_warps", "num_stages") if name in constants}
    report = compile_for(kernel, dict(args), constants, aligned=aligned, capability=capability, **options)
    if capability == 90 and "x2.f32" in report.ptx:
        check_merges(report.cubin)
    return report


def compile_specialized(mix: str, out_dtype: torch.dtype, bias: bool, scaling: str, **how: bool) -> PtxReport:
    """kernels/gemm/specialized/product.py's kernel; how: of `specialized_options`."""
    a, b = MIXES[mix]
    options = specialized_options(out_dtype.itemsize, scaling, **how)
    warps = options.pop("num_warps")
    return compile_for(
        gemm_specialized_kernel,
        {
            **{"a": a, "a_scale_inv": "*fp32", "b": b, "b_scale_inv": "*fp32"} | ({"bias": "*bf16"} if bias else {}),
            **{"c": TRITON_TYPES[out_dtype], "M": "i32", "N": "i32", "K": "i32"},
        },
        {**options, "addend": None} | ({} if bias else {"bias": None}),
        aligned=("a", "a_scale_inv", "b", "b_scale_inv", *(["bias"] if bias else []), "c", "K", "N"),
        num_warps=warps,
    )


class HopperDriver:
    """Stands in for the GPU's driver where there is none: torch asks it which GPU to read the kernel for."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0


def written(case: Case, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """The arguments that torch finds the kernel to write, in its order."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(triton.runtime.driver, "_active", HopperDriver())
    constants = {name: value for name, value in case.constants.items() if name not in ("num_warps", "num_stages")}
    with FakeTensorMode():
        arguments = {
            name: torch.empty(256, device="cuda", dtype=TORCH_DTYPES[kind]) if kind in TORCH_DTYPES else 256
            for name, kind in case.args.items()
        }
        kernel = kernel_side_table.add_kernel(case.kernel)
        rest = kernel_side_table.add_constant_args(constants)
        return tuple(get_mutated_tensors(kernel, rest, arguments, {}))


def constant_argument(case: Case, **values: int) -> Case:
    """The case with run-time arguments turned into constants."""
    return dataclasses.replace(
        case,
        name=f"{case.name} {values}",
        args={name: kind for name, kind in case.args.items() if name not in values},
        constants={**case.constants, **values},
        aligned=tuple(name for name in case.aligned if name not in values),
    )
