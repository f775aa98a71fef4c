"""Amaxes of several tensors in one launch, and stacks that are cast in one: the bits of each by itself, interpreted and on a GPU.

Run as a program, this file is the interpreted part: TRITON_INTERPRET must be set before Triton is imported.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from helpers.kernels.interpreter_process import run_in_interpreter
from helpers.kernels.kernel_cases import INPUT_KINDS, assert_same_bits, make_input, needs_cuda, run_poisoned

from te_dynamo.kernels.quantize.current import (
    MOST_TENSORS,
    partial_amaxes_of,
    partial_amaxes_of_reference,
    quantize,
    quantize_reference,
    quantize_stacked,
    quantize_stacked_reference,
)

SHAPES = ((128, 48), (0, 48), (1, 1), (3, 4099), (16, 256), (5, 7, 33), (1, 4096), (2, 4097))
KINDS = (*INPUT_KINDS, "normal")


def fresh(device: str):
    """What runs a function; on a GPU twice, on memory that it has to write."""
    return run_poisoned if device == "cuda" else lambda function: function()


def check_amaxes(device: str) -> None:
    form = (torch.float8_e4m3fn, True, True, False, 0.0)
    for dtype, count in ((torch.bfloat16, 5), (torch.float32, MOST_TENSORS)):
        kinds = [kind if 0 not in shape else "zeros" for kind, shape in zip(KINDS, SHAPES, strict=True)]
        xs = [make_input(kind, shape, dtype, device) for kind, shape in zip(kinds, SHAPES, strict=True)][-count:]
        (ours,) = fresh(device)(lambda xs=xs: [partial_amaxes_of(xs)])
        expected = partial_amaxes_of_reference([x.cpu() for x in xs])
        assert torch.equal(ours.cpu().amax(1).nan_to_num(-1.0), expected[:, 0].nan_to_num(-1.0)), dtype
        for x, partials in zip(xs, ours, strict=True):
            assert_same_bits(quantize(x, *form, partials), quantize_reference(x.cpu(), *form), (dtype, x.shape))


def check_stacks(device: str) -> None:
    usages = ((True, True), (True, False), (False, True))
    for by_columns, usage in itertools.product((False, True), usages):
        for dtype, sides in ((torch.float32, (128, 256)), (torch.bfloat16, (256, 128, 384))):
            if device == "cpu" and by_columns == (len(sides) == 2):
                continue  # an interpreted launch takes seconds
            shapes = [(19, side) if by_columns else (side, 24) for side in sides]
            xs = [make_input("normal", shape, dtype, device, seed=i) * 9**i for i, shape in enumerate(shapes)]
            form = (xs, torch.float8_e4m3fn, *usage, False, 0.0, by_columns)
            known = [xs[0].abs().amax().float().reshape(1), None, partial_amaxes_of(xs[-1:])[0]]
            amaxes = None if len(sides) == 2 else known
            ours = fresh(device)(lambda form=form, amaxes=amaxes: quantize_stacked(*form, amaxes))
            expected = quantize_stacked_reference([x.cpu() for x in xs], *form[1:])
            assert_same_bits(ours, expected, (dtype, by_columns, sides, usage))


@pytest.mark.slow
def test_equals_the_reference_in_the_interpreter() -> None:
    run_in_interpreter(__file__)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("check", [check_amaxes, check_stacks])
def test_equals_the_reference_on_a_gpu(check) -> None:
    check("cuda")


def main() -> None:
    from helpers.kernels import interpreted

    interpreted.install()
    np.seterr(all="ignore")
    check_amaxes("cpu")
    check_stacks("cpu")


if __name__ == "__main__":
    main()
