"""Several tensors in one launch: the bits of each by itself, in Triton's interpreter and on a GPU.

Run as a program, this file is the interpreted part: TRITON_INTERPRET must be set before Triton is imported.
"""

from __future__ import annotations

import itertools
from unittest import mock

import numpy as np
import pytest
import torch
from helpers.kernels.interpreter_process import run_in_interpreter
from helpers.kernels.kernel_cases import INPUT_KINDS, assert_same_bits, make_input, needs_cuda
from hypothesis import given, settings
from hypothesis import strategies as st

from te_dynamo.kernels.layouts.block import BlockForm
from te_dynamo.kernels.layouts.form import Form
from te_dynamo.kernels.layouts.mxfp8 import MXFP8Form
from te_dynamo.kernels.layouts.row import RowForm
from te_dynamo.kernels.layouts.tensor import TensorForm
from te_dynamo.kernels.quantize import several
from te_dynamo.kernels.quantize.several import SPAN, quantize_several, quantize_several_reference

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FORMS = (
    TensorForm(E4M3, True, False),
    TensorForm(E5M2, True, False, True),
    RowForm(E4M3, True, False),
    BlockForm(E4M3, True, False, True),
    BlockForm(E5M2, True, False, True, False, 1e-4),
    MXFP8Form(E4M3, True, False, 32, two_d=True),
    MXFP8Form(E4M3, True, False, 128, two_d=True),
)
SHAPES = ((16, 48), (0, 48), (3, SPAN // 2), (1, SPAN), (5, 16), (130, 160), (256, 128))
"""Of one scale a tensor one span, none, one and a half, exactly one; a ragged and whole tiles."""

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def check_one(xs: list[torch.Tensor], dtype: torch.dtype, form: Form) -> None:
    amaxes = [x.to(dtype).abs().amax().float().reshape(1) if x.numel() else x.new_ones(1).float() for x in xs]
    given = (xs, dtype, form, amaxes if isinstance(form, TensorForm) else ())
    with mock.patch.object(several, "launch", side_effect=several.launch) as launches:
        ours = quantize_several(*given)
    assert launches.call_count == any(isinstance(form, TensorForm) or x.numel() for x in xs)
    for i, (got, expected) in enumerate(zip(ours, quantize_several_reference(*given), strict=True)):
        assert_same_bits(got, expected, (xs[i].dtype, tuple(xs[i].shape), dtype, form))


def check(device: str) -> None:
    dtypes = (torch.bfloat16, torch.bfloat16), (torch.float32, torch.bfloat16), (torch.bfloat16, torch.float16)
    for form, (dtype, rounded_to) in itertools.product(FORMS, dtypes if device == "cuda" else dtypes[1:]):
        few = SHAPES if isinstance(form, TensorForm) or device == "cuda" else [s for s in SHAPES if s[1] < SPAN // 2]
        xs = [make_input("normal", shape, dtype).to(device) * 10**i for i, shape in enumerate(few)]
        xs += [xs[0][:, 16:], make_input("normal", (48, 40), dtype).to(device).t()[:, 32:]]  # not contiguous
        xs += [xs[-3].view(-1)[1:81].view(5, 16)]  # not aligned
        xs += [make_input(kind, (144, 16), dtype).to(device) for kind in INPUT_KINDS]
        check_one(xs, rounded_to, form)
        check_one([xs[1]], rounded_to, form)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    st.sampled_from(FORMS),
    st.lists(st.tuples(st.integers(0, 140), st.integers(1, 9), st.sampled_from(INPUT_KINDS)), min_size=1, max_size=5),
    st.sampled_from(DTYPES),
    st.sampled_from(DTYPES),
)
def check_any(form: Form, tensors: list, dtype: torch.dtype, rounded_to: torch.dtype) -> None:
    xs = [make_input(kind, (rows + 1, 16 * columns), dtype)[1:] for rows, columns, kind in tensors]
    check_one(xs, rounded_to, form)


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
    check_any()


if __name__ == "__main__":
    main()
