"""The NVFP4 kernels, compiled for Hopper and Blackwell and traced for Inductor without a GPU."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import triton
from helpers.kernels.compiled_cases import Case, HopperDriver, check_machine_code, written
from helpers.kernels.gemms import gemm_nvfp4
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import dispatch_functionalize
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from te_dynamo.kernels.layouts.nvfp4 import NVFP4Form
from te_dynamo.kernels.quantize import nvfp4, nvfp4_kernels
from te_dynamo.kernels.quantize.current import PARTIALS

ROW = ("data", "scale_inv", "amax")
COLUMN = ("columnwise_data", "columnwise_scale_inv", "columnwise_amax")
TILE = dict(zip(("BLOCK_M", "BLOCK_K", "num_warps"), nvfp4.TILE, strict=True))
FORMS = {
    "plain": {},
    "two_d": {"TWO_D": True},
    "hadamard": {"HADAMARD": True},
    "stochastic": {"STOCHASTIC": True},
    "gradient": {"HADAMARD": True, "STOCHASTIC": True},
}


def quantize_case(form: str, dtype: str, usages: tuple[bool, bool], capability: int = 90, odd: bool = False) -> Case:
    """One form of the quantizing kernel. odd: sizes of no known factor, so no wide loads and stores."""
    rowwise, columnwise = usages
    pointers = {"x": dtype, "partials": "*fp32", "columnwise_partials": "*fp32", "random": "*i32"}
    for names in (ROW, COLUMN):
        pointers |= dict(zip(names, ("*u8", "*u8", "*fp32"), strict=True))
    flags = {"TWO_D": False, "HADAMARD": False, "STOCHASTIC": False, **FORMS[form]}
    blackwell = capability >= 100
    casts = blackwell and not flags["STOCHASTIC"]
    return Case(
        name=f"quantize {form} {dtype[1:]} {rowwise=} {columnwise=} sm_{capability}{' odd' * odd}",
        kernel=nvfp4_kernels.quantize_nvfp4_kernel,
        args={**pointers, "M": "i32", "K": "i32"},
        constants={"ROWWISE": rowwise, "COLUMNWISE": columnwise, "PARTIALS": PARTIALS, **flags, **TILE}
        | {"SWIZZLED": blackwell, "CASTS": blackwell},
        aligned=(*pointers, *(() if odd else ("M", "K"))),
        has=(
            "cvt.rn.satfinite.e4m3x2.f32",
            *(() if odd else ("ld.global.v4.b32", "st.global.b32")),
            *(("cvt.rn.satfinite.e2m1x2.f32",) if casts else ()),
        ),
        # ftz would lose the denormals of the scales; a contracted multiply-add rounds once, where the reference rounds twice.
        lacks=("ftz", "local."),
        writes=(ROW if rowwise else ()) + (COLUMN if columnwise else ()),
        capability=capability,
    )


def of_one_value(case: Case) -> Case:
    """The same of a tensor of one value: sizes are known when compiling, and all else is zero."""
    return dataclasses.replace(
        case,
        name=case.name + " 1x1",
        args={name: kind for name, kind in case.args.items() if name not in ("M", "K")},
        constants={**case.constants, "M": 1, "K": 1},
    )


def cases() -> Iterator[Case]:
    for form in FORMS:
        for capability in (90, 100):
            yield quantize_case(form, "*bf16", (True, True), capability)
        for capability in (103, 110, 120, 121):
            yield quantize_case(form, "*bf16", (True, True), capability)
        yield quantize_case(form, "*fp32", (True, False))
        yield quantize_case(form, "*fp32", (False, True))
    yield quantize_case("plain", "*bf16", (True, False))
    yield quantize_case("plain", "*bf16", (False, True))
    yield quantize_case("gradient", "*fp16", (True, True))
    for capability in (90, 100):
        yield quantize_case("gradient", "*bf16", (True, True), capability, odd=True)
    yield of_one_value(quantize_case("gradient", "*bf16", (True, True), odd=True))
    for dtype, capability in itertools.product(("*bf16", "*fp16", "*fp32"), (90, 100)):
        yield Case(
            name=f"hadamard_amax {dtype[1:]} sm_{capability}",
            kernel=nvfp4_kernels.hadamard_amax_kernel,
            args={"x": dtype, "partials": "*fp32", "columnwise_partials": "*fp32", "M": "i32", "K": "i32"},
            constants={"ROWWISE": True, **TILE},
            aligned=("x", "partials", "columnwise_partials", "M", "K"),
            has=("ld.global.v4.b32",),
            lacks=("ftz", "local."),
            writes=("partials", "columnwise_partials"),
            capability=capability,
        )
    for amax, y in ((False, "*bf16"), (True, "*fp32")):
        yield Case(
            name=f"dequantize {amax=} {y[1:]}",
            kernel=nvfp4_kernels.dequantize_nvfp4_kernel,
            args={
                **{"data": "*u8", "scale_inv": "*u8", "amax": "*fp32", "y": y},
                **{"R": "i32", "columns": "i32", "row_bytes": "i32"},
            },
            constants={"HAS_AMAX": amax, "BLOCK_R": 16, "BLOCK_B": 128, "num_warps": 4},
            aligned=("data", "scale_inv", "amax", "y", "R", "columns", "row_bytes"),
            has=("ld.global.v4.b32", "st.global.v4.b32"),
            lacks=("ftz",),
            writes=("y",),
        )
    for bias in (True, False):
        yield Case(
            name=f"epilogue {bias=}",
            kernel=nvfp4_kernels.nvfp4_epilogue_kernel,
            args={
                **{"product": "*fp32", "a_amax": "*fp32", "b_amax": "*fp32", "bias": "*bf16", "c": "*bf16"},
                **{"first_row": "i32", "first_column": "i32", "row_stride": "i32", "M": "i32", "N": "i32"},
            },
            constants={"HAS_BIAS": bias, "BLOCK_M": 16, "BLOCK_N": 256, "num_warps": 4},
            aligned=("product", "a_amax", "b_amax", "bias", "c", "first_row", "first_column", "row_stride", "M", "N"),
            has=("ld.global.v4.b32", "st.global.v4.b32"),
            lacks=("fma.",),
            writes=("c",),
        )


CASES = list(cases())
FAST = ("quantize gradient bf16", "epilogue")


def as_parameter(case: Case) -> Any:
    """Compiling takes seconds each: the other forms and dtypes run with the slow tests."""
    fast = case.name.startswith(FAST) and case.capability <= 100 and "odd" not in case.name
    marks = () if fast else pytest.mark.slow
    return pytest.param(case, id=case.name, marks=marks)


@pytest.mark.one_fast_case
@pytest.mark.parametrize("case", [as_parameter(case) for case in CASES])
def test_machine_code(case: Case) -> None:
    check_machine_code(case)


@pytest.mark.parametrize("case", [case for case in CASES if case.capability == 90], ids=lambda case: case.name)
def test_torch_sees_what_the_kernel_writes(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    assert written(case, monkeypatch) == case.writes


def traced(function: Any, *shapes: tuple[int, ...], dynamic: bool = False) -> tuple[torch.fx.GraphModule, ShapeEnv]:
    """The graph of `function` on bf16 CUDA tensors of those shapes, the first dimension of each a symbol, 8, if `dynamic`."""
    environment = ShapeEnv()
    symbol = environment.create_symbol(8, ConstantSource("rows"), dynamic_dim=DimDynamic.DYNAMIC)
    rows = environment.create_symintnode(symbol, hint=8)
    previous = triton.runtime.driver._active
    triton.runtime.driver.set_active(HopperDriver())
    try:
        with FakeTensorMode(shape_env=environment):
            shapes = tuple((rows, *shape[1:]) if dynamic else shape for shape in shapes)
            inputs = [torch.empty(shape, dtype=torch.bfloat16, device="cuda") for shape in shapes]
            graph = make_fx(dispatch_functionalize(function), tracing_mode="real")(*inputs)
    finally:
        triton.runtime.driver._active = previous
    return graph, environment


@pytest.mark.one_fast_case
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_launchers_trace_with_exact_mutations_and_no_guards(dynamic: bool) -> None:
    def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        random = torch.zeros(2, dtype=torch.int32, device="cuda")
        a = nvfp4.quantize_nvfp4(x, NVFP4Form(True, False))
        b = nvfp4.quantize_nvfp4(weight, NVFP4Form(True, True, hadamard=True, stochastic_rounding=True), random)
        return gemm_nvfp4(*a, *b[:3], None, torch.bfloat16)

    graph, environment = traced(linear, (8, 128), (8, 128), dynamic=dynamic)
    launches = [node for node in graph.graph.nodes if "triton_kernel_wrapper_functional" in str(node.target)]
    assert [sorted(node.kwargs["tensors_to_clone"]) for node in launches] == [
        ["partials"],
        sorted(ROW),
        ["columnwise_partials", "partials"],
        sorted(ROW + COLUMN),
        ["y"],
        ["y"],
        ["c"],
    ]
    assert not environment.guards
