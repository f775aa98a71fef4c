"""MXFP8's quantizing kernels of values that are not packed in Triton's interpreter: equal to the reference, scales swizzled or not.

Run as a program, this file is the interpreted part: TRITON_INTERPRET must be set before Triton is imported.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from helpers.kernels.interpreter_process import run_in_interpreter
from helpers.kernels.kernel_cases import assert_same_bits, make_input

from te_dynamo.kernels.layouts.mxfp8 import MXFP8Form
from te_dynamo.kernels.quantize.mxfp8 import quantize_mxfp8, quantize_mxfp8_reference


@pytest.mark.slow
def test_kernels_equal_the_reference_in_the_interpreter() -> None:
    run_in_interpreter(__file__)


def main() -> None:
    from helpers.kernels import interpreted

    interpreted.install()
    np.seterr(all="ignore")
    # Columns in blocks of 128 are cast four at once, by instructions that the interpreter lacks.
    forms = ((32, (True, True)), (32, (True, False)), (32, (False, True)), (128, (True, False)))
    for shape, (scale_block, usage), swizzled in itertools.product(((35, 50), (130, 272)), forms, (False, True)):
        x = make_input("normal", shape, torch.float32)
        form = MXFP8Form(torch.float8_e4m3fn, *usage, scale_block, swizzled)
        assert_same_bits(quantize_mxfp8(x, form), quantize_mxfp8_reference(x, form), (shape, form))


if __name__ == "__main__":
    main()
