"""The GEMM with a scale a row: its reference against float64, what it refuses, and the kernel in Triton's interpreter.

Run as a program, this file is the interpreted part: TRITON_INTERPRET must be set before Triton is imported.
"""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from helpers.kernels import interpreted
from helpers.kernels.gemm_operands import E4M3, E5M2, FMAX, OUT, relative_error
from helpers.kernels.gemms import with_tile
from helpers.kernels.interpreter_process import run_in_interpreter

from te_dynamo.kernels.gemm import decode, multiply, product
from te_dynamo.kernels.gemm.choose import Choice, Product, choose
from te_dynamo.kernels.gemm.multiply import multiply_gated, run
from te_dynamo.kernels.gemm.reference import reference, reference_gated
from te_dynamo.kernels.gemm.request import Operand, Request, check
from te_dynamo.kernels.gemm.tiles import TILES, DecodeTile, Tile, specialized_tile
from te_dynamo.kernels.runtime.target import TARGETS
from te_dynamo.kernels.tiles.stacking import Stacking

SMALL = [Tile(32, 32, 32, 4, 3, fast, tflops=1, halves=halves) for fast, halves in ((True, False), (False, True))]
SMALL += [dataclasses.replace(SMALL[0], split_k=2), dataclasses.replace(SMALL[1], fast=False, halves=False)]


def request(
    m: int, n: int, k: int, dtype=torch.float32, biased: bool = True, a_dtype=E4M3, device: str = "cpu"
) -> Request:
    """Rows of very different sizes, each in its own scale."""
    generator = torch.Generator().manual_seed(0)
    sides = []
    for rows, fp8 in ((m, a_dtype), (n, E4M3)):
        x = torch.randn(rows, k, generator=generator) * 2.0 ** torch.randint(-12, 12, (rows, 1), generator=generator)
        scale = FMAX[fp8] / x.abs().amax(1)
        sides.append(Operand((x * scale[:, None]).to(fp8).to(device), (1 / scale).to(device), "row"))
    bias = torch.randn(n, generator=generator).to(device, torch.bfloat16) if biased else None
    return Request(*sides, dtype, bias=bias)


def in_float64(r: Request) -> torch.Tensor:
    """Scales go in before the sum, not after it."""
    left, right = (side.codes.double() * side.scale_inv.double()[:, None] for side in (r.a, r.b))
    product = left @ right.t()
    return product if r.bias is None else product + r.bias.double()


@pytest.mark.parametrize("dtype", OUT, ids=str)
@pytest.mark.parametrize("a_dtype", [E4M3, E5M2], ids=str)
def test_reference(dtype: torch.dtype, a_dtype: torch.dtype) -> None:
    for biased in (True, False):
        r = request(33, 24, 80, dtype, biased, a_dtype)
        exact, found = in_float64(r), reference(r)
        assert found.dtype == dtype
        error = (found.double() - exact).norm(dim=1) / exact.norm(dim=1)  # of each row: they differ by magnitudes
        bound = torch.finfo(dtype).eps if dtype != torch.float16 else 1.0  # fp16 has no such range
        assert (error.nan_to_num(0) < bound).all() or dtype == torch.float16


def test_a_scale_for_each_row_is_asked_for() -> None:
    r = request(32, 16, 64)
    for scale_inv in (r.a.scale_inv[:1], r.a.scale_inv[:, None], r.a.scale_inv.half()):
        wrong = dataclasses.replace(r, a=dataclasses.replace(r.a, scale_inv=scale_inv))
        with pytest.raises(ValueError, match=r"te gemm: expected a_scale_inv fp32 \[32\], got"):
            check(wrong)


def test_a_stack_is_a_longer_vector_of_scales() -> None:
    r = request(256, 384, 256, biased=False)
    for along, segments in (("M", (128, 128)), ("N", (128, 256))):
        stacked = dataclasses.replace(r, stacking=Stacking(along, segments))
        check(stacked)
        assert torch.equal(reference(stacked), reference(r)) and not stacked.borders.along
    with pytest.raises(ValueError, match="te gemm: operands with scales row do not stack along K"):
        check(dataclasses.replace(r, stacking=Stacking("K", (128, 128))))


def test_no_amax_of_gate_and_up() -> None:
    """Their reader finds an amax a row; of other scales than a tensor's the kernels that find one of all know nothing."""
    r = request(32, 16, 64, torch.bfloat16, biased=False)
    for function in (multiply_gated, reference_gated):
        with pytest.raises(
            ValueError, match="te gemm_gated: expected operands with one scale a tensor, got scales of row"
        ):
            function(r, 0, "silu")


@pytest.mark.parametrize("fast", [False, True])
def test_they_run_the_kernels_that_one_scale_a_tensor_runs(fast: bool) -> None:
    """The scales of rows are a thousandth of the bytes that a tile reads."""
    for size in ((8192, 4096, 4096), (8192, 14330, 4096), (4096, 1024, 1024), (16, 14336, 4096), (1, 4096, 14336)):
        for epilogue in ("none", "add"):
            by_rows, whole = (
                choose(Product(*size, fast, 2, epilogue, scaling=scaling), TARGETS["h200"])
                for scaling in ("row", "tensor")
            )
            assert (by_rows.kernel, by_rows.tile, by_rows.fused) == (whole.kernel, whole.tile, whole.fused), size
    kernels = [choose(Product(m, 4096, 14336, fast, scaling="row"), TARGETS["h200"]).kernel for m in (1, 8192)]
    assert kernels == ["decode", "specialized"]


@pytest.mark.slow
def test_kernel_in_the_interpreter() -> None:
    run_in_interpreter(__file__)


@pytest.mark.gpu
@pytest.mark.parametrize("tile", TILES, ids=lambda tile: tile.name)
def test_every_tile(tile: Tile) -> None:
    for biased, dtype in itertools.product((True, False), OUT):
        if (fitted := tile.fitted(dtype.itemsize)) is None:  # beside results of so many bytes
            continue
        r = request(333, 520, 1040, dtype, biased, device="cuda")
        got, want = with_tile(fitted, r).cpu(), in_float64(r).cpu()
        finite = want.abs() < torch.finfo(torch.float16).max / 2 if dtype == torch.float16 else want.isfinite()
        # The tensor core keeps fewer bits of a sum.
        bound = 2e-2 if tile.fast else 1e-2 if dtype != torch.float32 else 1e-3
        assert relative_error(got[finite], want[finite]) < bound


@pytest.mark.gpu
@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("size", [(1, 14336, 4096), (33, 4096, 14336), (7, 4112, 4096)], ids=str)
def test_decoding_has_the_other_kernels_bits(size: tuple[int, int, int], fast: bool) -> None:
    tile = choose(Product(*size, fast, scaling="row"), TARGETS["h200"]).tile
    assert isinstance(tile, DecodeTile)
    usual = Tile(64, 64, 128, 4, 3, fast, tflops=1, split_k=tile.split_k)
    for biased in (True, False):
        r = request(*size, torch.bfloat16, biased, device="cuda")
        assert torch.equal(with_tile(tile, r), with_tile(usual, r))


@pytest.mark.gpu
@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("shape", [(1, 8, 16), (300, 264, 1040), (257, 4096, 2064)], ids=str)
def test_the_specialized_kernel_has_the_other_ones_bits(shape: tuple[int, int, int], fast: bool) -> None:
    usual = next(tile for tile in TILES if tile.name == f"{'fast' if fast else 'slow'} 128x128x128 w8 s4")
    for biased, dtype, adds in itertools.product((True, False), OUT, (True, False)):
        r = dataclasses.replace(request(*shape, dtype, biased, device="cuda"), fast=fast)
        if adds and dtype != torch.float32:
            r = dataclasses.replace(r, addend=torch.randn(r.shape, device="cuda").to(dtype))
        for small in (False, True):
            tile = specialized_tile(fast, small=small)
            assert torch.equal(run(Choice("specialized", tile), r), with_tile(usual, r))


def main() -> None:
    interpreted.install_products()
    multiply.gemm_multiprocessors = lambda device: 3  # type: ignore[assignment]
    decode.libdevice = product.libdevice
    r = request(40, 48, 80)
    for tile in (SMALL[0], SMALL[2], DecodeTile(64, 64, 64, 4, 3, True, 1)):  # whole sums, parts of K, few rows
        addend = torch.randn(r.shape)
        added = with_tile(tile, dataclasses.replace(r, addend=addend))
        assert torch.equal(added, with_tile(tile, r) + addend), tile
    few = [DecodeTile(64, 64, 64, 4, 3, fast, split_k) for fast, split_k in ((True, 1), (False, 2))]
    sizes = (40, 48, 80), (33, 20, 64), (3, 64, 16)
    for tile, (m, n, k), biased in itertools.product((*SMALL, *few), sizes, (True, False)):
        r = request(m, n, k, biased=biased)
        got, want = with_tile(tile, r), in_float64(r)
        error = (got.double() - want).norm(dim=1) / want.norm(dim=1)
        assert (error < 1e-5).all(), (tile, (m, n, k), biased)


if __name__ == "__main__":
    main()
