"""kernels/gemm/decode.py: the machine code, the choice, the numbers in Triton's interpreter, the bits on a GPU.

Run as a program, this file is the interpreted part: TRITON_INTERPRET must be set before Triton is imported.
"""

from __future__ import annotations

import dataclasses
import types
from typing import Any

import pytest
import torch
from helpers.kernels import block_operands
from helpers.kernels.gemms import (
    gemm,
    gemm_amax,
    gemm_block,
    gemm_block_reference,
    gemm_block_with_tile,
    gemm_reference,
    gemm_stacked,
    gemm_stacked_reference,
    gemm_stacked_with_tile,
    gemm_with_tile,
)
from helpers.kernels.interpreter_process import run_in_interpreter

from te_dynamo.kernels.gemm import decode as kernels
from te_dynamo.kernels.gemm.choose import Product, choose
from te_dynamo.kernels.gemm.decode import decode_options
from te_dynamo.kernels.gemm.tiles import DecodeTile, Tile, choose_stacked_tile
from te_dynamo.kernels.runtime.target import TARGETS
from te_dynamo.kernels.tiles.stacking import Stacking

H200 = TARGETS["h200"]

SHAPES = [(1, 14336, 4096), (16, 4096, 14336), (33, 14336, 4096), (64, 28672, 4096), (7, 4112, 4144)]


def chosen(m: int, n: int, k: int, fast: bool, scaling: Any = "tensor") -> DecodeTile:
    choice = choose(Product(m, n, k, fast, scaling=scaling), H200)
    assert isinstance(choice.tile, DecodeTile)
    return choice.tile


def operands(m: int, n: int, k: int, device: str = "cpu") -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    a, b = (torch.randn(r, k, device=device).to(torch.float8_e4m3fn) for r in (m, n))
    return a, torch.full((1,), 0.5, device=device), b, torch.full((1,), 0.25, device=device)


@pytest.mark.parametrize("fast", [True, False])
def test_the_choice(fast: bool) -> None:
    assert chosen(1, 14336, 4096, fast).split_k == 1
    assert chosen(1, 4096, 14336, fast).split_k == 2, "a program a multiprocessor"
    assert chosen(1, 4096, 4096, fast).split_k == 1, "another launch takes as long as what parts save"
    assert chosen(1, 1024, 14336, fast).split_k == 4
    assert [chosen(m, 14336, 4096, fast).block_m for m in (1, 16, 17, 64)] == [16, 16, 32, 64]
    for others in ((65, 14336, 4096), (0, 14336, 4096), (1, 1024, 1024)):
        assert choose(Product(*others, fast), H200).kernel == "usual"
    assert choose(Product(1, 14336, 4096, fast, m_known=False), H200).kernel == "usual"
    assert choose(Product(1, 14336, 4096, fast), TARGETS["b200"]).kernel == "usual", "not Hopper"


def test_the_choice_with_scales_of_blocks() -> None:
    for scaling in ("row", "1x128"):
        assert chosen(1, 4096, 14336, False, scaling) == chosen(1, 4096, 14336, False)
    for scaling in ("128x128", "1x128 by 1x128"):
        assert choose(Product(16, 4096, 14336, scaling=scaling), H200).kernel == "usual", (
            "of few rows no block is whole"
        )
    assert choose(Product(65, 4096, 4096, scaling="1x128"), H200).kernel == "usual"


def test_rings() -> None:
    """All programs at once; slow accumulation takes 128 products between two additions."""
    for fast, rings in ((True, [(256, 4), (256, 3), (128, 3)]), (False, [(128, 8), (128, 6), (128, 3)])):
        tiles = [chosen(64, n, 4096, fast) for n in (4096, 14336, 28672)]
        assert [(tile.block_k, tile.num_stages) for tile in tiles] == rings


def compiled(tile: DecodeTile, n: int, k: int, options: dict[str, Any], scales: str) -> Any:
    """The kernel as a Hopper GPU has it. scales: their type."""
    from te_dynamo.kernels.runtime.compiled_code import compile_for

    return compile_for(
        kernels.gemm_decode_kernel,
        args={
            **{"a": "*fp8e4nv", "a_scale_inv": scales, "b": "*fp8e4nv", "b_scale_inv": scales, "bias": "*bf16"},
            **{"c": "*fp32" if tile.split_k > 1 else "*bf16", "partials": "*fp32"},
            **{"M": "i32", "N": "i32", "K": "i32"},
        },
        constexprs={"addend": None, **{name: value for name, value in options.items() if name != "num_warps"}},
        aligned=("a", "a_scale_inv", "b", "b_scale_inv", "bias", "c", "partials", "N", "K"),
        num_warps=tile.num_warps,
    )


@pytest.mark.slow
@pytest.mark.parametrize("scaling", ["tensor", "row"])
@pytest.mark.parametrize("partials", [0, 512])
@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_machine_code(m: int, n: int, k: int, fast: bool, partials: int, scaling: str) -> None:
    tile = chosen(m, n, k, fast)
    report = compiled(tile, n, k, decode_options(tile, n, k, tile.split_k == 1, None, partials, True, scaling), "*fp32")
    assert "wgmma.mma_async" in report.ptx and "cp.async.cg" in report.ptx
    assert "fma." not in report.ptx and not report.spills and not report.warnings
    assert 2 * (report.shared + 1024) <= 227 * 1024 or m > 32, "two programs on a multiprocessor"


@pytest.mark.slow
@pytest.mark.parametrize("codes", ["fp32", "u8"])
@pytest.mark.parametrize("scaling", ["1x128 128x128", "1x128 1x128"])
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_machine_code_with_scales_of_blocks(m: int, n: int, k: int, scaling: str, codes: str) -> None:
    tile = chosen(m, n, k, False, "1x128")
    report = compiled(tile, n, k, decode_options(tile, n, k, tile.split_k == 1, None, 0, True, scaling), f"*{codes}")
    assert "wgmma.mma_async" in report.ptx and "cp.async.cg" in report.ptx
    assert "fma.rn.f32" in report.ptx and not report.spills and not report.warnings
    assert 2 * (report.shared + 1024) <= 227 * 1024 or m > 32, "two programs on a multiprocessor"


@pytest.mark.slow
def test_in_the_interpreter() -> None:
    run_in_interpreter(__file__)


def main() -> None:
    kernels.libdevice = types.SimpleNamespace(mul_rn=lambda x, y: x * y)  # type: ignore[assignment]
    for m, n, k in ((1, 64, 256), (5, 80, 144), (16, 192, 512)):
        for fast in (True, False):
            tile = DecodeTile(16, 64, 64, 4, 3, fast, 1)
            a, sa, b, sb = operands(m, n, k)
            for bias in (None, torch.randn(n)):
                c = torch.full((m, n), torch.nan)
                partials = torch.full((4,), torch.nan)
                kernels.launch_decode(tile, a, sa, b, sb, bias, c, partials=partials)
                assert partials.max() == c.abs().max()
                torch.testing.assert_close(
                    c, gemm_reference(a, sa, b, sb, bias, torch.float32, fast), rtol=1e-5, atol=1e-4
                )
            parts = torch.full((2, m, n), torch.nan)
            kernels.launch_decode(dataclasses.replace(tile, split_k=2), a, sa, b, sb, None, parts)
            torch.testing.assert_close(parts.sum(0), a.float() @ b.float().t(), rtol=1e-5, atol=1e-4)
    for blocks, scaling in (("1x128.128x128", "1x128 128x128"), ("1x128.1x128", "1x128 1x128")):
        for m, n, k in ((1, 192, 384), (5, 80, 400), (16, 64, 640)):
            a, sa, b, sb, bias, *two_d = block_operands.operands(m, n, k, blocks)
            forms = [(sa, sb)]
            if not two_d[1]:
                forms.append((block_operands.e8m0(sa, m), block_operands.e8m0(sb, n)))
            for scales in forms:
                tile, c = DecodeTile(16, 64, 128, 4, 3, False, 1), torch.full((m, n), torch.nan)
                kernels.launch_decode(tile, a, scales[0], b, scales[1], bias, c, scaling=scaling)
                expected = gemm_block_reference(a, sa, b, sb, bias, torch.float32, *two_d)
                torch.testing.assert_close(c, expected, rtol=1e-5, atol=1e-4)
            parts = torch.full((2, m, n), torch.nan)
            tile = dataclasses.replace(tile, split_k=2)
            kernels.launch_decode(tile, a, sa, b, sb, None, parts, scaling=scaling)
            expected = gemm_block_reference(a, sa, b, sb, None, torch.float32, *two_d)
            torch.testing.assert_close(parts.sum(0), expected, rtol=1e-5, atol=1e-3)
    a, sa, b, _ = operands(3, 384, 128)
    for segments in ((128, 256), (128, 128, 128)):
        scales, c = torch.rand(len(segments)), torch.full((3, 384), torch.nan)
        kernels.launch_decode(DecodeTile(16, 64, 64, 4, 3, True, 1), a, sa, b, scales, None, c, Stacking("N", segments))
        expected = gemm_stacked_reference(a, sa, b, scales, None, torch.float32, True, "N", segments)
        torch.testing.assert_close(c, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_bits_of_the_other_kernels(m: int, n: int, k: int, fast: bool) -> None:
    a, sa, b, sb = operands(m, n, k, "cuda")
    tile = chosen(m, n, k, fast)
    other = Tile(64, 64, 128, 4, 3, fast, tflops=1, split_k=tile.split_k)
    if not fast or (k // tile.split_k) % 256 == 0:  # else the parts begin elsewhere
        got, expected = (gemm_with_tile(t, a, sa, b, sb, None, torch.bfloat16) for t in (tile, other))
        torch.testing.assert_close(got, expected, rtol=0, atol=0)
    bias = torch.randn(n, device="cuda", dtype=torch.bfloat16)
    got = gemm(a, sa, b, sb, bias, torch.bfloat16, fast)
    reference = gemm_reference(a, sa, b, sb, bias, torch.bfloat16, fast).float()
    error = (got.float() - reference).norm() / reference.norm()
    assert error < (0.02 if fast else 0.003), "fast accumulation keeps fewer bits than the reference's fp32"
    assert torch.equal(gemm(a, sa, b, sb, bias, torch.bfloat16, fast), got)


@pytest.mark.gpu
@pytest.mark.parametrize("blocks", ["1x128.128x128", "1x128.1x128"])
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_bits_of_the_other_kernels_with_scales_of_blocks(m: int, n: int, k: int, blocks: str) -> None:
    a, sa, b, sb, bias, *two_d = block_operands.operands(m, n, k, blocks, device="cuda", power_of_two=False)
    tile = chosen(m, n, k, False, "1x128")
    other = Tile(64, 64, 128, 4, 5, False, tflops=1, split_k=tile.split_k)
    arguments = a, sa, b, sb, bias, torch.bfloat16, *two_d
    got = gemm_block(*arguments)
    for each in (tile, other):
        torch.testing.assert_close(gemm_block_with_tile(each, *arguments), got, rtol=0, atol=0)
    assert torch.equal(gemm_block(*arguments), got)
    if blocks == "1x128.1x128":
        a, sa, b, sb, bias, *two_d = block_operands.operands(m, n, k, blocks, device="cuda")
        codes = block_operands.e8m0(sa, m), block_operands.e8m0(sb, n)
        got, expected = (gemm_block(a, x, b, y, bias, torch.bfloat16, *two_d) for x, y in (codes, (sa, sb)))
        torch.testing.assert_close(got, expected, rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("m", "n", "k"), [*SHAPES, (64, 65536, 128)])
def test_the_amax_beside_it(m: int, n: int, k: int, dtype: torch.dtype) -> None:
    """In one part of K, in several, and by a pass where there are more programs than places."""
    a, sa, b, sb = operands(m, n, k, "cuda")
    bias = torch.randn(n, device="cuda", dtype=torch.bfloat16)
    c, partials = gemm_amax(a, sa, b, sb, bias, dtype, True)
    torch.testing.assert_close(c, gemm(a, sa, b, sb, bias, dtype, True), rtol=0, atol=0)
    assert partials.max() == c.abs().max().float()
    a.view(torch.uint8)[m // 2, 3] = 0x7F  # NaN
    assert gemm_amax(a, sa, b, sb, bias, dtype, True)[1].max().isnan()


@pytest.mark.gpu
@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("m", [1, 16, 50])
def test_bits_of_a_stack(m: int, fast: bool) -> None:
    segments, k = (14336, 14336), 4096
    a, sa, b, _ = operands(m, sum(segments), k, "cuda")
    scales = torch.rand(2, device="cuda")
    got = gemm_stacked(a, sa, b, scales, None, torch.bfloat16, fast, "N", segments)
    stacking = Stacking("N", segments)
    tile = choose_stacked_tile(m, sum(segments), k, fast, stacking, out_bytes=2)
    torch.testing.assert_close(
        got, gemm_stacked_with_tile(tile, a, sa, b, scales, None, torch.bfloat16, stacking), rtol=0, atol=0
    )
    for i in range(2):
        rows = slice(14336 * i, 14336 * (i + 1))
        apart = gemm(a, sa, b[rows], scales[i : i + 1], None, torch.bfloat16, fast)
        torch.testing.assert_close(got[:, rows], apart, rtol=0, atol=0)


if __name__ == "__main__":
    main()
