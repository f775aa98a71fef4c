"""FP8 with a scale a row: the reference against current scaling row by row, the kernel against the reference in Triton's interpreter.

Run as a program, this file is the interpreted part: TRITON_INTERPRET must be set before Triton is imported.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from helpers.kernels.interpreter_process import run_in_interpreter
from helpers.kernels.kernel_cases import (
    DTYPES,
    FP8_DTYPES,
    INPUT_KINDS,
    RAGGED_SHAPES,
    assert_same_bits,
    gpu,
    make_input,
    needs_cuda,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from te_dynamo.kernels.layouts.row import RowForm
from te_dynamo.kernels.layouts.tensor import TensorForm
from te_dynamo.kernels.quantize.current import quantize_reference
from te_dynamo.kernels.quantize.float8_rowwise import quantize_rowwise, quantize_rowwise_reference
from te_dynamo.kernels.quantize.rows_of_several import quantize_stacked_rows, quantize_stacked_rows_reference
from te_dynamo.kernels.tiles.fp8 import zero_padded

E4M3 = torch.float8_e4m3fn
USAGES = ((True, True), (True, False), (False, True))
FORMS = st.tuples(
    st.sampled_from(FP8_DTYPES), st.sampled_from(USAGES), st.booleans(), st.sampled_from([0.0, 1e-3, 1e30])
)


def row_by_row(x: torch.Tensor, *form) -> list[torch.Tensor]:
    """data and scale_inv of x [M, K], each row a tensor of its own in current scaling."""
    fp8_dtype, power_of_two, eps = form
    rows = [quantize_reference(row[None], TensorForm(fp8_dtype, True, False, power_of_two, eps)) for row in x]
    data = torch.cat([codes.view(torch.uint8) for codes, _ in rows]).view(fp8_dtype)
    return [data, torch.cat([scale_inv for _, scale_inv in rows])]


def check_reference(x: torch.Tensor, form) -> None:
    fp8_dtype, usage, *rule = form
    expected = row_by_row(x, fp8_dtype, *rule) if usage[0] else []
    if usage[1]:
        data, scale_inv = row_by_row(x.t(), fp8_dtype, *rule)
        expected += [zero_padded(data, x.shape[1], -(-x.shape[0] // 16) * 16), scale_inv]
    assert_same_bits(quantize_rowwise_reference(x, RowForm(fp8_dtype, *usage, *rule)), expected)


@pytest.mark.parametrize("kind", INPUT_KINDS)
def test_each_row_is_a_tensor_in_current_scaling(kind: str) -> None:
    for dtype in DTYPES:
        for form in ((E4M3, (True, True), False, 0.0), (torch.float8_e5m2, (True, True), True, 1e-3)):
            check_reference(make_input(kind, (19, 40), dtype), form)


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 40), columns=st.integers(1, 80), exponent=st.integers(-130, 110), form=FORMS)
def test_reference_on_any_shape_and_magnitude(rows, columns, exponent, form) -> None:
    check_reference(torch.ldexp(make_input("normal", (rows, columns), torch.float32), torch.tensor(exponent)), form)


def test_leading_dimensions_are_read_as_rows_and_no_rows_have_the_scale_1() -> None:
    form = RowForm(E4M3, True, True)
    x = make_input("normal", (2, 3, 5, 32), torch.bfloat16)
    assert_same_bits(quantize_rowwise_reference(x, form), quantize_rowwise_reference(x.reshape(30, 32), form))
    data, scale_inv, transpose, columnwise_scale_inv = quantize_rowwise_reference(torch.empty(0, 4), form)
    assert (data.shape, scale_inv.shape, transpose.shape) == ((0, 4), (0,), (4, 0))
    assert torch.equal(columnwise_scale_inv, torch.ones(4))


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("kind", ["normal", "constant", "huge", "zeros"])
def test_reference_equals_torchao(kind: str, power_of_two: bool) -> None:
    """Its cast of rows and of columns, bit for bit, with its lower bound of an amax; it has other rules for denormals, inf and NaN."""
    peer = pytest.importorskip("torchao.float8.float8_scaling_utils", reason="torchao is not installed")
    config = pytest.importorskip("torchao.float8.config")
    mm = pytest.importorskip("torchao.float8.float8_training_tensor").LinearMMConfig()
    by_axis = {
        "scaling_granularity": config.ScalingGranularity.AXISWISE,
        "round_scales_to_power_of_2": power_of_two,
    }
    for dtype, fp8_dtype in itertools.product(DTYPES, FP8_DTYPES):
        x = make_input(kind, (32, 48), dtype)
        for dim, usage in ((-1, (True, False)), (0, (False, True))):
            cast = peer.hp_tensor_to_float8_dynamic(x, fp8_dtype, mm, axiswise_dim=dim, **by_axis)
            codes = cast._data.t().contiguous() if dim == 0 else cast._data
            ours = quantize_rowwise_reference(x, RowForm(fp8_dtype, *usage, power_of_two, 1e-12))
            assert_same_bits(ours, [codes, 1.0 / cast._scale.flatten()])


STACKS = [
    (((128, 40), (256, 40)), False),
    (((128, 72), (128, 72), (128, 72)), False),
    (((19, 256), (19, 128)), True),
]
"""(shapes, by_columns)"""


def stack(shapes, device: str = "cpu") -> list[torch.Tensor]:
    return [make_input("normal", shape, torch.bfloat16, device) * 4.0**i for i, shape in enumerate(shapes)]


@pytest.mark.parametrize(("shapes", "by_columns"), STACKS)
def test_a_stack_is_a_longer_tensor(shapes, by_columns: bool) -> None:
    """Of tensors one below the other the rows, of those side by side the columns: nothing else has a scale a row of the stack."""
    xs = stack(shapes)
    form = RowForm(E4M3, not by_columns, by_columns)
    whole = quantize_rowwise_reference(torch.cat(xs, int(by_columns)), form)
    assert_same_bits(quantize_stacked_rows_reference(xs, form, by_columns), whole)
    for usage in ((True, True), (by_columns, not by_columns)):
        with pytest.raises(ValueError, match="expected the rows of a stack by rows, or the columns of one by columns"):
            quantize_stacked_rows_reference(xs, RowForm(E4M3, *usage), by_columns)


@pytest.mark.slow
def test_kernel_equals_the_reference_in_the_interpreter() -> None:
    run_in_interpreter(__file__)


@gpu
@needs_cuda
@pytest.mark.parametrize("kind", INPUT_KINDS)
@pytest.mark.parametrize("shape", [*RAGGED_SHAPES, (1, 1), (0, 256)])
def test_kernel_equals_the_reference(shape, kind) -> None:
    for dtype in DTYPES:
        x = make_input(kind, shape, dtype, "cuda") if 0 not in shape else torch.empty(shape, dtype=dtype, device="cuda")
        for fp8_dtype in FP8_DTYPES:
            for usage in USAGES:
                form = RowForm(fp8_dtype, *usage)
                assert_same_bits(quantize_rowwise(x, form), quantize_rowwise_reference(x, form))


@gpu
@needs_cuda
@pytest.mark.parametrize(("shapes", "by_columns"), STACKS)
def test_kernel_of_a_stack_equals_the_reference(shapes, by_columns: bool) -> None:
    check_stack(stack(shapes, "cuda"), by_columns)


def check_stack(xs: list[torch.Tensor], by_columns: bool) -> None:
    given = RowForm(E4M3, not by_columns, by_columns), by_columns
    assert_same_bits(quantize_stacked_rows(xs, *given), quantize_stacked_rows_reference(xs, *given))


def main() -> None:
    import numpy as np
    from helpers.kernels import interpreted

    interpreted.install()
    np.seterr(all="ignore")

    @settings(max_examples=30, deadline=None)
    @given(
        rows=st.integers(0, 70),
        columns=st.integers(1, 90),
        exponent=st.integers(-100, 100),
        dtype=st.sampled_from(DTYPES),
        form=FORMS.filter(lambda form: form[0] == E4M3),  # the interpreter's e5m2 cast does not saturate
    )
    def check(rows, columns, exponent, dtype, form) -> None:
        x = torch.ldexp(make_input("normal", (rows, columns), torch.float32), torch.tensor(exponent)).to(dtype)
        fp8_dtype, usage, *rule = form
        given_form = RowForm(fp8_dtype, *usage, *rule)
        assert_same_bits(quantize_rowwise(x, given_form), quantize_rowwise_reference(x, given_form), given_form)

    check()
    for shapes, by_columns in STACKS:
        check_stack(stack(shapes), by_columns)
    for kind in INPUT_KINDS:
        x = make_input(kind, (9, 4100), torch.float32)  # two steps of the loop over K
        assert_same_bits(
            quantize_rowwise(x, RowForm(E4M3, True, True)),
            quantize_rowwise_reference(x, RowForm(E4M3, True, True)),
            kind,
        )


if __name__ == "__main__":
    main()
