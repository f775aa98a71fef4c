"""MXFP8's quantizing kernels in Triton's interpreter: equal to the reference, scales swizzled or not.

Run as a program, this file is the interpreted part: TRITON_INTERPRET must be set before Triton is imported.
"""

from __future__ import annotations

import itertools
import sys

import numpy as np
import pytest
import torch
from helpers.kernels.interpreter_process import run_in_interpreter
from helpers.kernels.kernel_cases import DTYPES, FP8_DTYPES, INPUT_KINDS, assert_same_bits, make_input
from hypothesis import given, settings
from hypothesis import strategies as st

from te_dynamo.kernels.layouts.mxfp8 import SCALE_BLOCKS, MXFP8Form
from te_dynamo.kernels.quantize.mxfp8 import quantize_mxfp8, quantize_mxfp8_reference

E4M3 = torch.float8_e4m3fn
USAGES = ((True, True), (True, False), (False, True))
BOTH = (False, True)


def check(kind: str, shape: tuple[int, int], dtype: torch.dtype, form: MXFP8Form) -> None:
    x = make_input(kind, shape, dtype)
    assert_same_bits(quantize_mxfp8(x, form), quantize_mxfp8_reference(x, form), (kind, shape, dtype, form))


def main(part: str) -> None:
    from helpers.kernels import interpreted

    interpreted.install()
    np.seterr(all="ignore")
    PARTS[part]()


def forms() -> None:
    for shape, block, usage, swizzled in itertools.product(((35, 50), (130, 272)), SCALE_BLOCKS, USAGES, BOTH):
        for two_d in BOTH:
            check("normal", shape, torch.float32, MXFP8Form(E4M3, *usage, block, swizzled, two_d))


def squares() -> None:
    """Every kind of values in blocks of 32x32 and of 128x128; bf16 in words, ragged and in whole tiles."""
    shapes, fp8_dtypes = ((35, 56), (128, 128)), itertools.cycle(FP8_DTYPES)
    for kind, block, dtype, shape in itertools.product(INPUT_KINDS, SCALE_BLOCKS, DTYPES, shapes):
        check(kind, shape, dtype, MXFP8Form(next(fp8_dtypes), True, True, block, two_d=True))
    for usage, block, swizzled in itertools.product(USAGES, SCALE_BLOCKS, BOTH):
        check("normal", (160, 136), torch.bfloat16, MXFP8Form(E4M3, *usage, block, swizzled, True))


@given(
    *(st.integers(1, 160), st.integers(1, 160)),
    *map(st.sampled_from, (DTYPES, USAGES, SCALE_BLOCKS, BOTH, BOTH)),
)
@settings(max_examples=40, deadline=None, derandomize=True)
def any_shape(
    rows: int, columns: int, dtype: torch.dtype, usage: tuple[bool, bool], block: int, swizzled: bool, two_d: bool
) -> None:
    check("normal", (rows, columns), dtype, MXFP8Form(E4M3, *usage, block, swizzled, two_d))


PARTS = {function.__name__: function for function in (forms, squares, any_shape)}


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_kernels_equal_the_reference_in_the_interpreter(part: str) -> None:
    run_in_interpreter(__file__, part)


if __name__ == "__main__":
    main(*sys.argv[1:])
