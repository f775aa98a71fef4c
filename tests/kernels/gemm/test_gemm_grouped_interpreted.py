"""The product of groups of columns in Triton's interpreter, which refuses a copy that starts off a multiple of 16 bytes.

On a GPU such a copy is an illegal instruction, and nothing in the machine code shows it. Run as a program, this file is the
interpreted half: TRITON_INTERPRET must be set before Triton is imported.
"""

from __future__ import annotations

import types

import pytest
import torch
from helpers.kernels.gemm_operands import relative_error
from helpers.kernels.gemms import gemm_grouped_columns_with_tile
from helpers.kernels.grouped_operands import column_operands, exact_columns, offsets
from helpers.kernels.interpreter_process import run_in_interpreter

from te_dynamo.kernels.gemm import multiply, product
from te_dynamo.kernels.gemm.tiles import Tile

TILES = [Tile(32, 32, 32, 4, 3, fast, tflops=1, halves=halves) for fast, halves in ((True, False), (False, True))]
TILES.append(Tile(32, 32, 32, 4, 3, fast=False, tflops=1))

SIZES = [
    [40, 0, 33, 1, 64],  # a first and a last block; one that is both; whole blocks only
    [3, 0, 29, 0, 1],  # all in one block or two, empty groups at odd starts
    [16, 48, 0, 5, 27, 96],  # aligned starts
    [31, 2, 30, 1, 97],
    [0, 0, 5],
]


@pytest.mark.slow
def test_copies_of_ragged_groups_are_aligned() -> None:
    run_in_interpreter(__file__)


def main() -> None:
    product.libdevice = types.SimpleNamespace(mul_rn=lambda x, y: x * y)  # type: ignore[assignment]
    multiply.gemm_multiprocessors = lambda device: 3  # type: ignore[assignment]
    for tile in TILES:
        for sizes in SIZES:
            check_product(tile, sizes)
        check_neighbours(tile)


def check_product(tile: Tile, sizes: list[int]) -> None:
    operands = column_operands(sum(sizes), 48, 40)
    offs = offsets(sizes)
    got = gemm_grouped_columns_with_tile(tile, *operands, offs, torch.float32)
    want = exact_columns(*operands, offs)
    for group in range(len(sizes)):  # an empty group's product and its relative error are zero
        assert relative_error(got[group], want[group]) < 1e-5, f"{tile.name} {sizes} group {group}"


def check_neighbours(tile: Tile) -> None:
    """A NaN in either operand stays in its group. It is the e5m2 operand's: the interpreter reads e4m3's NaN as a number."""
    left, left_scale, right, right_scale = column_operands(80, 48, 48)
    left[3, 40] = float("nan")
    for operands in ((left, left_scale, right, right_scale), (right, right_scale, left, left_scale)):
        got = gemm_grouped_columns_with_tile(tile, *operands, offsets([39, 3, 38]), torch.float32)
        assert got[1].isnan().any() and not got[0].isnan().any() and not got[2].isnan().any(), tile.name


if __name__ == "__main__":
    main()
