"""Block scaling's kernels, compiled without a GPU: the instructions they must have, no spills, no warnings."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

import pytest
import torch
import triton
from helpers.kernels import compiled_cases as compiled
from helpers.kernels.compiled_cases import Case, compile_case
from helpers.slow import slow_but
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import dispatch_functionalize
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from te_dynamo.kernels.gemm.multiply import gemm_options
from te_dynamo.kernels.gemm.product import gemm_kernel
from te_dynamo.kernels.gemm.tiles import BLOCK_TILES, BlockGemmTile, choose_block_tile
from te_dynamo.kernels.layouts.block import BlockForm
from te_dynamo.kernels.quantize.block_kernels import quantize_block_kernel
from te_dynamo.kernels.quantize.float8_block import block_tile, quantize_block
from te_dynamo.kernels.runtime.compiled_code import PtxReport
from te_dynamo.kernels.runtime.target import TARGETS
from te_dynamo.kernels.tiles.stacking import NOT_STACKED

E4M3 = torch.float8_e4m3fn
TORCH_TYPES = {"*bf16": torch.bfloat16, "*fp16": torch.float16, "*fp32": torch.float32}

# -- quantization ----------------------------------------------------------------------------------


def quantize_case(
    dtype: str,
    rowwise: bool,
    columnwise: bool,
    two_d: bool,
    power_of_two: bool = True,
    fp8: str = "fp8e4nv",
    whole: bool = True,
    groups: int = 0,
) -> Iterator[Case]:
    """A case for each launch."""
    packed = dtype == "*bf16" and power_of_two
    itemsize = TORCH_TYPES[dtype].itemsize
    order, constant_order = compiled.padded_order_arguments(groups)
    rows, warps, group = block_tile(columnwise, two_d, packed)
    for usage in BlockForm(torch.float8_e4m3fn, rowwise, columnwise, two_d).launches(itemsize):
        by_rows, by_columns = usage.values()
        buffers = {"data": by_rows, "scale_inv": by_rows, "transpose": by_columns, "columnwise_scale_inv": by_columns}
        types = {name: "*fp32" if "scale" in name else f"*{fp8}" for name in buffers}
        yield Case(
            name=f"{dtype} {two_d=} {by_rows=} {by_columns=} {power_of_two=} {fp8} {whole=} {groups=}",
            kernel=quantize_block_kernel,
            args={"x": dtype, **types, "M": "i32", "K": "i32", **order},
            constants={
                **{"FMAX": 448.0 if fp8 == "fp8e4nv" else 57344.0, "EPS": 0.0, "POWER_OF_TWO": power_of_two},
                **{"LARGEST": torch.finfo(TORCH_TYPES[dtype]).max, "SCALING": "128x128" if two_d else "1x128"},
                **{"ROWWISE": by_rows, "COLUMNWISE": by_columns, "ROWS": rows, "GROUP_M": group, "num_warps": warps},
                **{"PACKED": packed, "WHOLE": whole, **constant_order},
            },
            aligned=("x", *buffers, "M", "K"),
            has=(
                *("ld.global.v4", "st.global.v2" if packed and not by_columns else "st.global.v4"),
                # Two values an instruction.
                *(("mul.rn.bf16x2", "max.u16x2") if packed else ()),
                # Nothing is clamped before it.
                "cvt.rn.satfinite.e4m3x2.f32" if fp8 == "fp8e4nv" else "cvt.rn.satfinite.e5m2x2.f32",
                *(() if power_of_two else ("div.rn.f32",)),
            ),
            lacks=("div.full", "fma.rn.f32") if power_of_two else ("div.full",),
            writes=tuple(name for name, written in buffers.items() if written),
        )


def quantize_cases() -> Iterator[Case]:
    yield from quantize_case("*bf16", True, True, False)
    yield from quantize_case("*bf16", True, True, True)
    yield from quantize_case("*bf16", True, True, False, whole=False)
    yield from quantize_case("*bf16", True, False, False)
    yield from quantize_case("*bf16", False, True, False, whole=False, groups=8)
    yield from quantize_case("*bf16", True, True, False, power_of_two=False, fp8="fp8e5")
    yield from quantize_case("*fp16", True, True, False)
    yield from quantize_case("*fp32", True, True, False)


QUANTIZE_CASES = list(quantize_cases())

# -- gemm ------------------------------------------------------------------------------------------


def gemm_case(
    tile: BlockGemmTile,
    two_d: tuple[bool, bool],
    scales: str = "*fp32",
    out: str = "*bf16",
    bias: bool = False,
    n: int = 4096,
    capability: int = 90,
) -> Case:
    return Case(
        name=f"{tile.name} {two_d=} {scales} {out} {bias=} {n=} sm_{capability}",
        kernel=gemm_kernel,
        args={
            **{"a": "*fp8e4nv", "a_scale_inv": scales, "b": "*fp8e4nv", "b_scale_inv": scales},
            **({"bias": "*bf16"} if bias else {}),
            **{"c": "*fp32" if tile.split_k > 1 else out, "M": "i32", "N": "i32", "K": "i32"},
        },
        constants={
            "addend": None,
            **({} if bias else {"bias": None}),
            **gemm_options(tile, n, " ".join("128x128" if wide else "1x128" for wide in two_d), NOT_STACKED),
        },
        aligned=(
            *("a", "a_scale_inv", "b", "b_scale_inv", "c", "K"),
            *(("bias",) if bias else ()),
            *(("N",) if n % 16 == 0 else ()),
        ),
        has=("wgmma.mma_async", "fma.rn.f32") if capability == 90 else ("tcgen05.mma", "fma.rn.f32"),
        writes=("c",),
        capability=capability,
        programs_per_sm=tile.ctas_per_sm,
    )


FORWARD, WGRAD, SWAPPED = (False, True), (False, False), (True, False)


def gemm_cases() -> Iterator[Case]:
    large, decode = choose_block_tile(8192, 4096, 4096, out_bytes=2), choose_block_tile(1, 4096, 14336)
    yield gemm_case(large, FORWARD, bias=True)
    yield gemm_case(large, WGRAD)
    yield gemm_case(large, WGRAD, scales="*u8")
    yield gemm_case(large, SWAPPED)
    yield gemm_case(choose_block_tile(8192, 4096, 4096), WGRAD, out="*fp32")
    yield gemm_case(choose_block_tile(8192, 4095, 4096), WGRAD, out="*fp32", n=4095)
    yield gemm_case(choose_block_tile(512, 4096, 14336, out_bytes=2), FORWARD)
    yield gemm_case(decode, FORWARD)
    yield gemm_case(decode, WGRAD, scales="*u8")
    # Triton makes a constant of an integer argument that is 1.
    yield compiled.constant_argument(gemm_case(decode, FORWARD), M=1)
    yield gemm_case(choose_block_tile(8192, 4096, 4096, TARGETS["b200"]), FORWARD, bias=True, capability=100)


GEMM_CASES = list(gemm_cases())

# --------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("case", [*QUANTIZE_CASES, *GEMM_CASES], ids=lambda case: case.name)
def test_machine_code(case: Case) -> None:
    report = compile_case(case)
    assert report.spills == 0, report.log
    assert harmful(report) == [], report.log
    assert report.shared <= compiled.SHARED_BYTES // case.programs_per_sm
    assert all(text in report.ptx for text in case.has)
    assert not any(text in report.ptx for text in case.lacks)


def harmful(report: PtxReport) -> list[str]:
    """Warnings of serialized wgmma. C7519 is none: LLVM moved the zeros that a product starts from past Triton's fence,
    and ptxas repeats that one instruction behind them."""
    return [warning for warning in report.warnings if not warning.startswith("C7519")]


@pytest.mark.one_fast_case
@pytest.mark.parametrize(
    "case", slow_but(2, [c for c in QUANTIZE_CASES if "offs" not in c.args]), ids=lambda case: case.name
)
def test_every_byte_of_a_quantization_moves_in_wide_loads_and_stores(case: Case) -> None:
    """Bytes and halves would be what a transpose through single elements looks like; scales alone are 4-byte stores."""
    ptx = compile_case(case).ptx
    assert not re.search(r"(ld|st)\.global\S*\.[bu](8|16)\b", ptx)
    assert set(re.findall(r"ld\.global\S*?\.(v4|v2|b32|b64)\b", ptx)) == {"v4"}


@pytest.mark.parametrize("case", [case for case in [*QUANTIZE_CASES, *GEMM_CASES] if case.capability == 90], ids=str)
def test_torch_sees_what_the_kernel_writes(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    assert compiled.written(case, monkeypatch) == case.writes


def test_one_scaled_addition_a_product_of_128() -> None:
    """Each half leaves the tensor core after 4 instructions of 32 products for one multiply-add a sum."""
    tile = next(tile for tile in BLOCK_TILES if tile.halves)
    ptx = compile_case(gemm_case(tile, FORWARD)).ptx
    assert ptx.count("wgmma.mma_async") == 2 * 4
    assert ptx.count("fma.rn.f32") == tile.block_m * tile.block_n // (32 * tile.num_warps)


@pytest.mark.slow
@pytest.mark.parametrize("two_d", [FORWARD, WGRAD], ids=["1x128.128x128", "1x128.1x128"])
@pytest.mark.parametrize("tile", [tile for tile in BLOCK_TILES if tile.split_k <= 2], ids=lambda tile: tile.name)
def test_every_candidate_fits_on_a_multiprocessor(tile: BlockGemmTile, two_d: tuple[bool, bool]) -> None:
    report = compile_case(gemm_case(tile, two_d))
    assert tile.fits(2)
    assert report.shared <= compiled.SHARED_BYTES // tile.ctas_per_sm
    assert report.registers * 32 * tile.num_warps * tile.ctas_per_sm <= 65536
    assert report.spills == 0 and not harmful(report)


@pytest.mark.slow
def test_quantization_compiles_for_every_usage_and_for_sm_100() -> None:
    for dtype, usage, two_d in itertools.product(TORCH_TYPES, ((True, False), (False, True)), (False, True)):
        for case in quantize_case(dtype, *usage, two_d):
            test_machine_code(case)
    for case in quantize_case("*bf16", True, True, False):
        assert compile_case(Case(**{**vars(case), "capability": 100})).spills == 0


# -- tracing ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype, launches", [(torch.bfloat16, 1), (torch.float32, 2)], ids=str)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("two_d", [False, True], ids=["1x128", "128x128"])
def test_the_launcher_traces_with_exact_mutations_and_no_guards_of_its_own(
    two_d, dynamic, dtype, launches, monkeypatch
) -> None:
    monkeypatch.setattr(triton.runtime.driver, "_active", compiled.HopperDriver())
    environment = ShapeEnv()
    symbol = environment.create_symbol(8, ConstantSource("rows"), dynamic_dim=DimDynamic.DYNAMIC)
    rows = environment.create_symintnode(symbol, hint=8) if dynamic else 8
    with FakeTensorMode(shape_env=environment):
        x = torch.empty((rows, 256), dtype=dtype, device="cuda")

        def function(x: torch.Tensor) -> list[torch.Tensor]:
            return quantize_block(x, BlockForm(E4M3, True, True, two_d))

        graph = make_fx(dispatch_functionalize(function), tracing_mode="real")(x)
    nodes = [node for node in graph.graph.nodes if "triton_kernel_wrapper_functional" in str(node.target)]
    mutated = [sorted(node.kwargs["tensors_to_clone"]) for node in nodes]
    pairs = [["data", "scale_inv"], ["columnwise_scale_inv", "transpose"]]
    assert mutated == ([sorted(pairs[0] + pairs[1])] if launches == 1 else pairs)
    # Not ours: the number of blocks is a size of a buffer, and torch asks of every size whether it is 1.
    assert all(str(guard.expr).endswith("+ 127)//128), 1)") for guard in environment.guards)
