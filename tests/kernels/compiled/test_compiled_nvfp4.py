"""The NVFP4 kernels, compiled for sm_90 and sm_100 and traced for Inductor without a GPU."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import triton
from helpers.kernels.compiled_cases import Case, HopperDriver, compile_case, written
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import dispatch_functionalize
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from te_dynamo.kernels.gemm.nvfp4 import gemm_nvfp4
from te_dynamo.kernels.quantize import nvfp4, nvfp4_kernels, shared_tile
from te_dynamo.kernels.quantize.current import PARTIALS

ROW = ("data", "scale_inv", "amax")
COLUMN = ("columnwise_data", "columnwise_scale_inv", "columnwise_amax")
FORMS = {
    "plain": {},
    "two_d": {"TWO_D": True},
    "hadamard": {"HADAMARD": True},
    "stochastic": {"STOCHASTIC": True},
    "gradient": {"HADAMARD": True, "STOCHASTIC": True},
}


def tile(dtype: str, words: bool = False) -> dict[str, int]:
    rows, columns, warps = nvfp4.WORDS_TILE if words else nvfp4.TILE
    return {"BLOCK_M": rows, "BLOCK_K": columns, "num_warps": warps * (2 if dtype == "*fp32" else 1)}


def quantize_case(form: str, dtype: str, usages: tuple[bool, bool], capability: int = 90, shape: str = "whole") -> Case:
    """One form of the quantizing kernel. shape: "whole" tiles; "ragged" ones, of rows of whole 16 bytes; "odd", K of no known
    factor, so no wide loads and stores."""
    rowwise, columnwise = usages
    flags = {"TWO_D": False, "HADAMARD": False, "STOCHASTIC": False, **FORMS[form]}
    packed = dtype == "*bf16" and shape != "odd"
    flags |= {"PACKED": packed, "WHOLE": packed and shape == "whole"}
    pointers = {"x": dtype, "partials": "*fp32", "columnwise_partials": "*fp32", "random": "*i32"}
    for names in (ROW, COLUMN):
        pointers |= dict(zip(names, ("*u8", "*u8", "*fp32"), strict=True))
    sizes = ("M", "column_words")
    width = {"whole": 4096, "ragged": 4104, "odd": 4093}[shape]
    strips = packed and shape == "whole" and columnwise
    # In strips rows have the columns' words, elsewhere they read them again, which are kept until then.
    loads = ("ld.global.L1::evict_last",) if columnwise else ()
    if rowwise:
        loads += ("st.shared.v2.b32 [%r", "ld.shared.v4.b32 {") if strips else ("ld.global.L1::evict_first",)
    wide_stores = ("st.global.v4.b32",) if columnwise or not packed else ("st.global.b64",)
    # One register a store would be single bytes of data; ftz would lose the denormals of the scales.
    lacks = ("mul.ftz", "mul.rn.ftz", "local.", *(() if packed and rowwise else ("st.global.b8",)))
    lacks += ("ld.global.L1::evict_first",) if strips else ()
    return Case(
        name=f"quantize {form} {dtype[1:]} {rowwise=} {columnwise=} sm_{capability} {shape}",
        kernel=nvfp4_kernels.quantize_nvfp4_kernel,
        args={**pointers, **dict.fromkeys(sizes, "i32")},
        constants={
            **{"K": width, "ROWWISE": rowwise, "COLUMNWISE": columnwise, "PARTIALS": PARTIALS, "STRIPS": strips},
            **{**flags, **tile(dtype, packed)},
        },
        aligned=(*pointers, *(() if shape == "odd" else sizes)),
        has=(
            "cvt.rn.satfinite.e4m3x2.f32",
            *(loads if packed else ()),
            *(() if shape == "odd" else ("ld.global.v4.b32", *wide_stores)),
        ),
        lacks=() if shape == "odd" else lacks,
        writes=(ROW if rowwise else ()) + (COLUMN if columnwise else ()),
        capability=capability,
    )


def of_one_value(case: Case) -> Case:
    """The same of a tensor of one value: sizes are known when compiling, and all else is zero."""
    return dataclasses.replace(
        case,
        name=case.name + " 1x1",
        args={name: kind for name, kind in case.args.items() if name != "M"},
        constants={**case.constants, "M": 1, "K": 1},
        aligned=tuple(name for name in case.aligned if name != "M"),
    )


def cases() -> Iterator[Case]:
    for form in FORMS:
        yield quantize_case(form, "*bf16", (True, True))
        yield quantize_case(form, "*fp32", (True, False))
        yield quantize_case(form, "*fp32", (False, True))
    yield quantize_case("plain", "*bf16", (True, False))
    yield quantize_case("plain", "*bf16", (False, True))
    yield quantize_case("plain", "*fp16", (True, True))
    yield quantize_case("gradient", "*fp16", (True, True))
    yield quantize_case("gradient", "*bf16", (True, True), shape="ragged")
    yield of_one_value(quantize_case("plain", "*bf16", (True, True), shape="odd"))
    yield quantize_case("plain", "*bf16", (True, True), capability=100)
    yield quantize_case("gradient", "*bf16", (True, True), capability=100)
    for dtype in ("*bf16", "*fp16", "*fp32"):
        yield Case(
            name=f"hadamard_amax {dtype[1:]}",
            kernel=nvfp4_kernels.hadamard_amax_kernel,
            args={"x": dtype, "partials": "*fp32", "columnwise_partials": "*fp32", "M": "i32"},
            constants={
                "K": 4096,
                "ROWWISE": True,
                **tile(dtype, dtype == "*bf16"),
                "PACKED": dtype == "*bf16",
                "WHOLE": dtype == "*bf16",
            },
            aligned=("x", "partials", "columnwise_partials", "M"),
            has=("ld.global.L1::evict_first" if dtype == "*bf16" else "ld.global.v4.b32",),
            writes=("partials", "columnwise_partials"),
        )
    block, warps = nvfp4.WORDS_AMAX
    yield Case(
        name="words_amax",
        kernel=nvfp4_kernels.words_amax_kernel,
        args={"x": "*bf16", "partials": "*fp32", "WORDS": "i32"},
        constants={"BLOCK": block, "num_warps": warps},
        aligned=("x", "partials", "WORDS"),
        has=("ld.global.v4.b32", "max.u16x2"),
        writes=("partials",),
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
                **{"M": "i32", "N": "i32"},
            },
            constants={"HAS_BIAS": bias, "BLOCK_M": 16, "BLOCK_N": 256, "num_warps": 4},
            aligned=("product", "a_amax", "b_amax", "bias", "c", "M", "N"),
            has=("ld.global.v4.b32", "st.global.v4.b32"),
            lacks=("fma.",),
            writes=("c",),
        )


CASES = list(cases())
ODD = [quantize_case(form, dtype, usages, shape="odd") for form, dtype, usages in (
    ("plain", "*bf16", (True, True)),
    ("gradient", "*bf16", (True, True)),
    ("two_d", "*fp32", (True, False)),
    ("gradient", "*fp32", (False, True)),
)]  # fmt: skip


FAST = ("quantize plain bf16 rowwise=True columnwise=True sm_90", "quantize gradient bf16", "dequantize", "epilogue")


def as_parameter(case: Case) -> Any:
    """Compiling takes seconds each: the other forms, dtypes and targets run with the slow tests."""
    marks = () if case.name.startswith(FAST) and case.capability == 90 else pytest.mark.slow
    return pytest.param(case, id=case.name, marks=marks)


@pytest.mark.parametrize("case", [as_parameter(case) for case in CASES])
def test_machine_code(case: Case) -> None:
    report = compile_case(case)
    # What is emulated on sm_100 is for its own tensor cores to replace; Triton 3.7 on spills a few words there, and Triton 3.6
    # on sm_90 of fp16 gradients.
    few_words = case.capability == 100 or case.name.startswith("quantize gradient fp16")
    assert report.spills <= (256 if few_words else 0), report.log
    assert report.warnings == (), report.log
    for text in case.has:
        assert text in report.ptx
    for text in case.lacks:
        assert text not in report.ptx


@pytest.mark.slow
@pytest.mark.parametrize("case", ODD, ids=lambda case: case.name)
def test_ragged_shapes_compile(case: Case) -> None:
    assert compile_case(case).warnings == ()


def test_blocks_of_columns_stay_in_a_thread() -> None:
    """Neither their maxima nor their transform exchange data between threads: only amax, words and scales do."""
    plain, hadamard = (compile_case(quantize_case(form, "*bf16", (False, True))).ptx for form in ("plain", "hadamard"))
    for what in ("bar.sync", "st.shared", "ld.shared"):
        assert plain.count(what) == hadamard.count(what)
    # The largest partial amax; Triton 3.9 has one instruction for a warp's.
    within_warps = [code.count("shfl.sync") + code.count("redux.sync") for code in (plain, hadamard)]
    assert within_warps == ([3, 3] if plain.count("shfl.sync") else [2, 2])


@pytest.mark.parametrize("form", ["plain", "two_d", "gradient"])
def test_a_warp_reads_the_rows_that_it_has_written(form: str) -> None:
    """Each of the four groups of rows is one warp's, which waits for no other: kernels/quantize/shared_tile.py."""
    report = compile_case(quantize_case(form, "*bf16", (True, True)))
    layouts = dict(re.findall(r"(#blocked\d*) = (#ttg\.blocked<.*)", report.ttgir))
    places = {"st.shared.v2": ("4x32", "[1, 32]"), "ld.shared.v4": ("16x8", "[4, 8]")}
    for access, (shape, threads) in places.items():
        lines = [line for line in report.ttgir.splitlines() if access in line]
        assert len(lines) == {"st.shared.v2": 1, "ld.shared.v4": 4}[access]
        used = {name for line in lines for name in re.findall(rf"tensor<{shape}xi32, (#blocked\d*)>", line)}
        assert len(used) == 1, lines
        layout = layouts[used.pop()]
        expected = f"sizePerThread = [1, 1], threadsPerWarp = {threads}, warpsPerCTA = [4, 1], order = [1, 0]"
        assert expected in layout, layout
    assert report.ptx.count("bar.warp.sync") == 2
    assert report.shared >= shared_tile.BYTES == 64 * 256


def test_pieces_of_rows_are_in_different_banks() -> None:
    """Eight threads read 16 bytes each, every other piece of a row, and 16 threads write a half of it: eight banks of 16 bytes."""
    places = np.array([shared_tile.place_of_piece.fn(piece) for piece in range(16)])
    assert sorted(places) == list(range(0, 256, 16))
    for together in (places[0::2], places[1::2], places[:8], places[8:]):
        assert len(set(together // 16 % 8)) == 8


def test_rows_of_words_stay_in_their_threads() -> None:
    """Neighbouring threads have neighbouring blocks of a row, and what they make of them moves nowhere before it is stored."""
    report = compile_case(quantize_case("plain", "*bf16", (True, False)))
    layouts = dict(re.findall(r"(#blocked\d*) = (#ttg\.blocked<.*)", report.ttgir))
    used = re.findall(r"tt\.(?:load|store) .*tensor<\d+x\d+x!tt\.ptr<\w+>, (#blocked\d*)>", report.ttgir)
    assert len(used) == 16  # of four rows at a time two halves of words, codes and scales
    for name in used:
        assert "threadsPerWarp = [4, 8]" in layouts[name] and "order = [1, 0]" in layouts[name], layouts[name]
    assert "convert_layout" not in report.ttgir


@pytest.mark.parametrize("case", [case for case in CASES if case.capability == 90], ids=lambda case: case.name)
def test_torch_sees_what_the_kernel_writes(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    assert written(case, monkeypatch) == case.writes


@pytest.mark.slow
def test_a_size_of_one_becomes_a_constant() -> None:
    """Triton makes a constant of an integer argument that is 1."""
    case = quantize_case("gradient", "*bf16", (True, True), shape="odd")
    args = {key: kind for key, kind in case.args.items() if key != "M"}
    compile_case(dataclasses.replace(case, args=args, constants={**case.constants, "M": 1}))


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


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_launchers_trace_with_exact_mutations_and_no_guards(dynamic: bool) -> None:
    def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        random = torch.zeros(2, dtype=torch.int32, device="cuda")
        a = nvfp4.quantize_nvfp4(x, True, False, False, False, False, None)
        b = nvfp4.quantize_nvfp4(weight, True, True, False, True, True, random)
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


@pytest.mark.parametrize(
    "shape, programs",
    [
        *(((14336, 4096), 1792), ((8192, 14336), 3584), ((8192, 4096), 1024), ((256, 128), 1)),
        *(((128, 128), 2), ((0, 128), 1), ((256, 0), 1)),  # no whole strip, nothing
    ],
)
def test_every_strip_of_four_tiles_has_a_program(shape: tuple[int, int], programs: int) -> None:
    graph, _ = traced(lambda x: nvfp4.quantize_nvfp4(x, True, True, False, False, False, None), shape)
    grids = [node.kwargs["grid"] for node in graph.graph.nodes if "triton_kernel_wrapper" in str(node.target)]
    assert grids == [[(PARTIALS, 1, 1)], [(programs, 1, 1)]]
