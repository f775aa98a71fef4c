"""Tensors of millions of rows: what a launch of their size may be, and the kernels that such launches have, on a few rows.

Run as a program, this file is the interpreted part: TRITON_INTERPRET must be set before Triton is imported.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers.kernels.interpreter_process import run_in_interpreter
from helpers.kernels.kernel_cases import assert_same_bits, make_input

from te_dynamo.kernels.activation import activation
from te_dynamo.kernels.layouts.block import BlockForm
from te_dynamo.kernels.layouts.form import Form
from te_dynamo.kernels.layouts.mxfp8 import SCALE_BLOCKS, MXFP8Form
from te_dynamo.kernels.produce.tensor import LARGE_TILES, write_tile
from te_dynamo.kernels.quantize import current
from te_dynamo.kernels.quantize.float8_block import block_launches
from te_dynamo.kernels.quantize.formats import FORMATS, columns_of_groups, columns_of_groups_reference, reference_of
from te_dynamo.kernels.quantize.mxfp8 import mxfp8_launches
from te_dynamo.kernels.tiles import blocks

E4M3 = torch.float8_e4m3fn
USAGES = ((True, True), (True, False), (False, True))
FORMS: list[Form] = [BlockForm(E4M3, *usage, two_d) for usage in USAGES for two_d in (False, True)]
FORMS += [
    MXFP8Form(E4M3, *usage, block, two_d=two_d) for usage in USAGES for block in SCALE_BLOCKS for two_d in (False, True)
]


@pytest.mark.parametrize("rows", [2**16, 4_194_241, 8_388_481, 2**26])
@pytest.mark.parametrize("form", FORMS, ids=repr)
def test_cuda_takes_the_grid(form: Form, rows: int) -> None:
    for packed in (False, True):
        size = rows, 256
        launches = (
            block_launches(form, size, 2, packed, None, 1.0)
            if isinstance(form, BlockForm)
            else mxfp8_launches(form, size, 2, packed, None)
        )
        for _, grid, _ in launches:
            assert max(grid[1:]) <= 65535 and grid[0] < 2**31, grid


@pytest.mark.parametrize("rows", [2**24, 2**24 + 1, 2**25, 2**26 + 5])
def test_offsets_inside_of_a_tile_of_the_transpose_have_32_bits(rows: int) -> None:
    tiles = [current.cast_tile(rows, 1024, True)]
    tiles += [write_tile(name, 2, (rows, 1024), True, False, False) for name in LARGE_TILES]
    for block_m, block_k, _ in tiles:
        assert (block_k - 1) * ((rows + 15) // 16 * 16) + block_m <= 2**31


def main() -> None:
    """With a grid whose third number may be 1 alone, so that the rows are one group."""
    from helpers.kernels import interpreted

    interpreted.install()
    np.seterr(all="ignore")
    blocks.MOST_IN_Z = 1
    cases = ((150, 136), torch.bfloat16), ((256, 128), torch.bfloat16), ((129, 50), torch.float32)
    offs = torch.tensor([100, 130], dtype=torch.int32)
    for number, form in enumerate(FORMS):
        shape, dtype = cases[number % 3]
        x = make_input("normal", shape, dtype)
        assert_same_bits(FORMATS[type(form)].kernel(x, form), reference_of(x, form), form)
        y = activation.activation(x, "silu")
        fused = activation.activation_quantize(x, "silu", form, True)
        assert_same_bits(fused, [y, *reference_of(y, form)], form)
        if not form.rowwise:
            assert_same_bits(columns_of_groups(x, offs, form), columns_of_groups_reference(x, offs, form), form)


@pytest.mark.slow
def test_kernels_equal_the_reference_in_the_interpreter() -> None:
    run_in_interpreter(__file__)


if __name__ == "__main__":
    main()
