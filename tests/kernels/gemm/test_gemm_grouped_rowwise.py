"""Products by groups with a scale a row: the reference against each group alone, quantizing, and both kernels in Triton's interpreter.

Run as a program, this file is the interpreted part: TRITON_INTERPRET must be set before Triton is imported.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from helpers.kernels.gemm_operands import E4M3, E5M2
from helpers.kernels.gemms import with_tile
from helpers.kernels.grouped_operands import offsets
from helpers.kernels.interpreter_process import run_in_interpreter
from helpers.kernels.kernel_cases import assert_same_bits, gpu, make_input, needs_cuda

from te_dynamo.kernels.gemm import multiply
from te_dynamo.kernels.gemm.choose import Choice, Product, choose
from te_dynamo.kernels.gemm.multiply import run
from te_dynamo.kernels.gemm.reference import reference
from te_dynamo.kernels.gemm.request import Operand, Request, check
from te_dynamo.kernels.gemm.tiles import GROUPED_TILES, Tile, specialized_tile
from te_dynamo.kernels.layouts.row import GroupedRowForm, RowForm
from te_dynamo.kernels.quantize.float8_rowwise import quantize_rowwise_reference
from te_dynamo.kernels.quantize.rows_of_several import (
    quantize_columns_of_groups,
    quantize_columns_of_groups_reference,
    quantize_grouped_rows,
    quantize_grouped_rows_reference,
)
from te_dynamo.kernels.runtime.target import TARGETS
from te_dynamo.kernels.tiles.groups import group_bounds

SIZES = [[40, 0, 33, 1, 64], [3, 0, 29, 0, 1], [16, 48, 0, 5, 27, 96], [0, 0, 5]]
USAGES = [(True, True), (True, False), (False, True)]
COLUMNS = RowForm(E4M3, False, True)


def tokens(m: int, k: int, seed: int = 0) -> torch.Tensor:
    """Rows and columns of very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    sizes = (torch.randint(-8, 8, shape, generator=generator) for shape in ((m, 1), (1, k)))
    return torch.randn(m, k, generator=generator) * 2.0 ** sum(sizes)


def rows_request(sizes: list[int], n: int, k: int, behind: int = 0) -> Request:
    groups = len(sizes)
    a = Operand(*quantize_rowwise_reference(tokens(sum(sizes) + behind, k), RowForm(E4M3, True, False)), "row")
    weights = torch.stack([tokens(n, k, 1 + group) for group in range(groups)])
    b = Operand(*quantize_grouped_rows_reference(weights, GroupedRowForm(E4M3, True, False)), "row")
    return Request(a, b, torch.float32, groups="rows", offs=offsets(sizes))


def columns_request(sizes: list[int], n: int, k: int) -> Request:
    offs, m = offsets(sizes), sum(sizes)
    sides = [
        Operand(*quantize_columns_of_groups_reference(tokens(m, side, seed), offs, RowForm(fp8, False, True)), "row")
        for side, fp8, seed in ((n, E5M2, 0), (k, E4M3, 1))
    ]
    return Request(*sides, torch.float32, groups="columns", offs=offs)


def exact(r: Request) -> torch.Tensor:
    """In float64, the scales in before the sums."""
    (m, _, k), found = r.mnk, torch.zeros(r.shape, dtype=torch.float64)
    for group, (start, end) in enumerate(group_bounds(r.offs, m if r.groups == "rows" else k)):
        place = slice(start, end)
        if r.groups == "rows":
            left = r.a.codes[place].double() * r.a.scale_inv[place, None].double()
            found[place] = left @ (r.b.codes[group].double() * r.b.scale_inv[group, :, None].double()).t()
        else:
            left, right = (x.codes[:, place].double() * x.scale_inv[group, :, None].double() for x in (r.a, r.b))
            found[group] = left @ right.t()
    return found


def assert_close(got: torch.Tensor, r: Request) -> None:
    """Of every row, as they differ by magnitudes."""
    want = exact(r)
    error = (got.double() - want).norm(dim=-1) / want.norm(dim=-1).clamp(min=1e-30)
    assert (error < 1e-5).all()


@pytest.mark.parametrize("sizes", SIZES)
def test_reference(sizes: list[int]) -> None:
    for r in (rows_request(sizes, 48, 64, behind=3), columns_request(sizes, 64, 48)):
        assert_close(reference(r), r)


def test_scales_of_each_group_are_asked_for() -> None:
    sizes = [16, 16]
    for r, side, text in (
        (rows_request(sizes, 48, 64), "b", r"\[2, 48\]"),
        (columns_request(sizes, 64, 48), "a", r"\[2, 64\]"),
    ):
        operand = getattr(r, side)
        wrong = dataclasses.replace(operand, scale_inv=operand.scale_inv[0])
        with pytest.raises(ValueError, match=rf"te grouped gemm: expected {side}_scale_inv fp32 {text}, got"):
            check(dataclasses.replace(r, **{side: wrong}))


@pytest.mark.parametrize("sizes", SIZES)
def test_columns_of_a_group_are_those_of_it_alone(sizes: list[int]) -> None:
    x = tokens(sum(sizes) + 2, 24).bfloat16()
    codes, scale_inv = quantize_columns_of_groups_reference(x, offsets(sizes), COLUMNS)
    for group, (start, end) in enumerate(group_bounds(offsets(sizes), len(x))):
        data, alone = quantize_rowwise_reference(x[start:end], COLUMNS)
        assert_same_bits([scale_inv[group]], [alone])
        assert_same_bits([codes[:, start:end].contiguous()], [data[:, : end - start].contiguous()])
    assert not codes[:, sum(sizes) :].view(torch.uint8).any(), "zero behind the last group"


def test_wgrad_of_large_experts_runs_the_specialized_kernel() -> None:
    for fast in (False, True):
        asked = Product(4096, 4096, 65536, fast, 2, scaling="row", k_groups=8)
        assert choose(asked, TARGETS["h200"]).specialized
        assert choose(dataclasses.replace(asked, k_groups=0, m_groups=8), TARGETS["h200"]).kernel == "usual"


@pytest.mark.slow
def test_in_the_interpreter() -> None:
    run_in_interpreter(__file__)


def quantizing(device: str) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        weights = torch.stack([make_input("normal", (19, 40), dtype, device) * 4.0**i for i in range(3)])
        for usage in USAGES:
            form = GroupedRowForm(E4M3, *usage)
            assert_same_bits(quantize_grouped_rows(weights, form), quantize_grouped_rows_reference(weights, form))
    for sizes in SIZES:
        x, offs = tokens(sum(sizes) + 21, 72).to(device, torch.bfloat16), offsets(sizes, device)
        form = x, offs, COLUMNS
        assert_same_bits(quantize_columns_of_groups(*form), quantize_columns_of_groups_reference(*form))


@gpu
@needs_cuda
def test_quantizing_on_a_gpu() -> None:
    quantizing("cuda")


def on_gpu(r: Request) -> Request:
    a, b = (Operand(x.codes.cuda(), x.scale_inv.cuda(), "row") for x in (r.a, r.b))
    assert r.offs is not None
    return dataclasses.replace(r, a=a, b=b, offs=r.offs.cuda())


@pytest.mark.gpu
@pytest.mark.parametrize("fast", [False, True])
def test_kernels_on_a_gpu(fast: bool) -> None:
    tiles = [tile for tile in GROUPED_TILES if tile.fast == fast]
    bound = 0.02 if fast else 1e-3  # the tensor core's own sums, which keep fewer bits, are of 128 values, or of all
    for sizes in ([300, 0, 33, 1, 640], [128, 256, 5]):
        rows, columns = on_gpu(rows_request(sizes, 264, 1040, 7)), on_gpu(columns_request(sizes, 256, 264))
        for r in (rows, columns):
            for tile in tiles:
                got = with_tile(tile, dataclasses.replace(r, fast=fast)).cpu()
                error = (got.double() - exact(r)).norm() / exact(r).norm()
                assert error < bound, tile.name
        specialized = run(Choice("specialized", specialized_tile(fast)), dataclasses.replace(columns, fast=fast))
        assert (specialized.cpu().double() - exact(columns)).norm() / exact(columns).norm() < bound
        if all(size % 128 == 0 for size in sizes[:-1]):  # both begin a group's sums at the same places
            assert torch.equal(specialized, with_tile(tiles[-1], dataclasses.replace(columns, fast=fast)))


def main() -> None:
    from helpers.kernels import interpreted

    interpreted.install()
    interpreted.install_products()
    multiply.gemm_multiprocessors = lambda device: 3  # type: ignore[assignment]
    quantizing("cpu")
    tiles = [Tile(32, 32, 32, 4, 3, fast, tflops=1, halves=halves) for fast, halves in ((True, False), (False, True))]
    for tile in tiles:
        for sizes in SIZES:
            for r in (rows_request(sizes, 48, 64, behind=3), columns_request(sizes, 64, 48)):
                assert_close(with_tile(tile, r), r)


if __name__ == "__main__":
    main()
