"""Several tensors in one launch: the bits of each by itself, in Triton's interpreter and on a GPU.

Run as a program, this file is the interpreted part: TRITON_INTERPRET must be set before Triton is imported.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from helpers.kernels.interpreter_process import run_in_interpreter
from helpers.kernels.kernel_cases import assert_same_bits, make_input, needs_cuda

from te_dynamo.kernels.layouts.tensor import TensorForm
from te_dynamo.kernels.quantize.several import SPAN, quantize_several, quantize_several_reference

SHAPES = ((16, 48), (0, 48), (3, SPAN // 2), (1, SPAN), (5, 33))
"""One span, none, one and a half, exactly one; and an odd number of values."""


def check(device: str) -> None:
    forms = itertools.product((torch.bfloat16, torch.float32), (torch.bfloat16, torch.float16), (False, True))
    for dtype, rounded_to, power_of_two in forms:
        xs = [make_input("normal", shape, dtype).to(device) * 10**i for i, shape in enumerate(SHAPES)]
        xs.append(xs[0][:, 1:])  # not contiguous
        xs.append(make_input("nan", (16, 16), dtype).to(device))
        amaxes = [x.to(rounded_to).abs().amax().float().reshape(1) if x.numel() else x.new_ones(1).float() for x in xs]
        form = rounded_to, TensorForm(torch.float8_e4m3fn, True, False, power_of_two), amaxes
        ours = quantize_several(xs, *form)
        for got, expected in zip(ours, quantize_several_reference(xs, *form), strict=True):
            assert_same_bits(got, expected, (dtype, rounded_to, power_of_two))
        assert all(scale_inv.data_ptr() % 16 == 0 for _, scale_inv in ours)


@pytest.mark.slow
def test_equals_the_reference_in_the_interpreter() -> None:
    run_in_interpreter(__file__)


@pytest.mark.gpu
@needs_cuda
def test_equals_the_reference_on_a_gpu() -> None:
    check("cuda")


def main() -> None:
    from helpers.kernels import interpreted

    interpreted.install()
    np.seterr(all="ignore")
    check("cpu")


if __name__ == "__main__":
    main()
