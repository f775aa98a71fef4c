"""Every kernel's machine code, compiled without a GPU: the instructions it must have, no spills, no warnings.

To add a kernel, append its `Case`s to CASES.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch
from helpers.kernels.compiled_cases import (
    MIXES,
    SHARED_BYTES,
    TRITON_TYPES,
    Case,
    check_machine_code,
    compile_case,
    constant_argument,
    written,
)
from helpers.oracles.fp8_merges import unwritten_merges
from helpers.slow import slow_but

from te_dynamo.kernels.gemm.multiply import gemm_options
from te_dynamo.kernels.gemm.product import gemm_kernel, gemm_reduce_kernel
from te_dynamo.kernels.gemm.tiles import TILES, Tile, choose_tile
from te_dynamo.kernels.runtime.compiled_code import compile_for
from te_dynamo.kernels.tiles.stacking import NOT_STACKED

# -- gemm ------------------------------------------------------------------------------------------

# M, N, K of the products of forward, dgrad and wgrad that the tiles are chosen for, and of inference.
GEMM_SHAPES = [
    (8192, 14336, 4096),
    (8192, 4096, 14336),
    (8192, 1024, 4096),
    (4096, 1024, 4096),
    (4096, 16384, 8192),
    (1024, 1024, 8192),
    (512, 4096, 14336),
    (64, 4096, 14336),
    (16, 14336, 4096),
    (1, 4096, 4096),
    (128, 256, 96),
    (64, 320, 64),
]


def chosen_tiles(odd_n: bool = False) -> list[Tile]:
    """The tiles of both accumulations for GEMM_SHAPES, or for the same shapes with N less one."""
    chosen = (choose_tile(m, n - odd_n, k, fast) for m, n, k in GEMM_SHAPES for fast in (True, False))
    return list(dict.fromkeys(chosen))


def gemm_case(tile: Tile, mix: str, out_dtype: torch.dtype, bias: bool, n: int, capability: int = 90) -> Case:
    a, b = MIXES[mix]
    c = "*fp32" if tile.split_k > 1 else TRITON_TYPES[out_dtype]
    multiples = ("a", "a_scale_inv", "b", "b_scale_inv", "bias", "c", "K") + (("N",) if n % 16 == 0 else ())
    return Case(
        name=f"gemm {tile.name} {mix} {out_dtype} {bias=} {n=} sm_{capability}",
        kernel=gemm_kernel,
        args={
            **{"a": a, "a_scale_inv": "*fp32", "b": b, "b_scale_inv": "*fp32", "c": c},
            **({"bias": "*bf16"} if bias else {}),
            **{"M": "i32", "N": "i32", "K": "i32"},
        },
        constants={
            "addend": None,
            **({} if bias else {"bias": None}),
            **gemm_options(tile, n, "tensor", NOT_STACKED),
        },
        aligned=multiples if bias else tuple(name for name in multiples if name != "bias"),
        has=(f".f32.{mix}", "wgmma.mma_async") if capability == 90 else ("tcgen05.mma",),
        # A contracted multiply-add would make a fused bias differ from an addition of its own.
        lacks=("fma.",),
        writes=("c",),
        capability=capability,
        programs_per_sm=tile.ctas_per_sm,
    )


def with_addend(case: Case) -> Case:
    """The case of a kernel that adds; torch must not see it write the addend."""
    return dataclasses.replace(
        case,
        name=f"{case.name} addend",
        args={**case.args, "addend": case.args["c"]},
        constants={name: value for name, value in case.constants.items() if name != "addend"},
        aligned=(*case.aligned, "addend"),
    )


def gemm_cases() -> Iterator[Case]:
    for fast in (True, False):
        yield with_addend(gemm_case(choose_tile(4096, 1024, 4096, fast), "e4m3.e4m3", torch.bfloat16, True, 4096))
    for tile in chosen_tiles():
        yield gemm_case(tile, "e4m3.e4m3", torch.bfloat16, bias=tile.split_k == 1, n=4096)
        if not tile.narrow:
            yield gemm_case(tile, "e5m2.e4m3", torch.float32, bias=True, n=4096)
    for tile in chosen_tiles(odd_n=True):
        if tile.split_k == 1:
            yield gemm_case(tile, "e4m3.e5m2", torch.float16, bias=True, n=4095)
    for fast in (True, False):
        # Triton makes a constant of an integer argument that is 1.
        yield constant_argument(
            gemm_case(choose_tile(1, 14336, 4096, fast), "e4m3.e4m3", torch.bfloat16, True, 4096), M=1
        )
        yield gemm_case(choose_tile(8192, 4096, 4096, fast), "e4m3.e4m3", torch.bfloat16, True, 4096, capability=100)
    counted = gemm_case(choose_tile(4096, 4096, 4096, True), "e4m3.e4m3", torch.bfloat16, True, 4096)
    for size in ("M", "K"):  # of as many tokens as data says
        yield dataclasses.replace(counted, name=f"{counted.name} {size} i64", args={**counted.args, size: "i64"})
    for scaling, partials in (("tensor", 0), ("1x128 1x128", 0), ("row", 0), ("tensor", 512)):
        yield Case(
            name=f"gemm_reduce {scaling=} {partials=}",
            kernel=gemm_reduce_kernel,
            args={
                **{
                    "parts": "*fp32",
                    "a_scale_inv": "*fp32",
                    "b_scale_inv": "*fp32",
                    "bias": "*bf16",
                    "c": "*bf16",
                    "partials": "*fp32",
                },
                **{"SIZE": "i32", "N": "i32"},
            },
            constants={
                "addend": None,
                "SCALING": scaling,
                "HAS_BIAS": True,
                "SPLIT_K": 4,
                "PARTIALS": partials,
                "EARLY": False,
                "BLOCK": 1024,
            },
            aligned=("parts", "a_scale_inv", "b_scale_inv", "bias", "c", "partials", "SIZE", "N"),
            has=("ld.global.v4.b32",),
            lacks=("fma.",),
            writes=("c", "partials") if partials else ("c",),
        )


CASES: list[Case] = [*gemm_cases()]

# --------------------------------------------------------------------------------------------------


@pytest.mark.one_fast_case
@pytest.mark.parametrize("case", slow_but(4, CASES), ids=lambda case: case.name)
def test_machine_code(case: Case) -> None:
    check_machine_code(case)


@pytest.mark.parametrize("case", [case for case in CASES if case.capability == 90], ids=lambda case: case.name)
def test_torch_sees_what_the_kernel_writes(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that torch cannot read is taken to write every argument, and costs a copy of each."""
    assert written(case, monkeypatch) == case.writes


def test_slow_accumulation_adds_in_fp32_after_every_block() -> None:
    """Each half leaves the tensor core after 4 instructions of 32 products, 128 in all, for fp32 additions."""
    tile = next(tile for tile in TILES if tile.halves and tile.block_m == 256)
    ptx = compile_case(gemm_case(tile, "e4m3.e4m3", torch.bfloat16, False, 4096)).ptx
    additions_of_a_thread = tile.block_m * tile.block_n // (32 * tile.num_warps)
    assert ptx.count("wgmma.mma_async") == 2 * 4
    assert ptx.count("add.f32") == additions_of_a_thread


def test_a_wrong_argument_name_is_an_error() -> None:
    with pytest.raises(ValueError, match="unknown \\['partz'\\]"):
        compile_for(gemm_reduce_kernel, {"partz": "*fp32"}, {})
    case = next(case for case in CASES if case.kernel is gemm_reduce_kernel)
    with pytest.raises(ValueError, match="aligned names no run-time argument"):
        compile_for(case.kernel, case.args, case.constants, aligned=("BLOCK",))


@pytest.mark.slow
@pytest.mark.parametrize("tile", [tile for tile in TILES if tile.split_k <= 2], ids=lambda tile: tile.name)
def test_every_candidate_fits_on_a_multiprocessor(tile: Tile) -> None:
    """Also those not chosen yet: shared memory and registers suffice for as many programs as the table says."""
    case = gemm_case(tile, "e4m3.e4m3", torch.bfloat16, False, 4096)
    report = compile_case(case)
    assert tile.fits(2)
    assert report.shared <= SHARED_BYTES // tile.ctas_per_sm
    assert report.registers * 32 * tile.num_warps * tile.ctas_per_sm <= 65536
    assert report.spills == 0


def test_a_cast_that_keeps_an_unwritten_half_is_found() -> None:
    """Of the words {z, z, z, z} and {x, z, z, z}, as ptxas 12.8 writes them, and as they are right."""
    cast = "F2FP.SATFINITE.E4M3.F32.PACK_AB_MERGE_C"
    wrong = f"""
        --:-:-:-:1 LDG.E R5, desc[UR4][R2.64+0x4];
        --:-:-:-:1 LDG.E R0, desc[UR4][R2.64];
        --:-:-:-:1 {cast} R7, R5, R5, R4;
        --:-:-:-:1 PRMT R4, R7, 0x7632, R4;
        --:-:-:-:1 {cast} R5, R5, R0, R4;"""
    (found,) = unwritten_merges(wrong)
    assert "R7, R5, R5, R4" in found
    assert unwritten_merges(wrong.replace(f"{cast} R7", f"{cast} R4, R5, R5, RZ;\n {cast} R7")) == []
