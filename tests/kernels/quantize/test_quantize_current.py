"""Current scaling: the reference against an independent formulation, the kernels of tensors, stacks and groups against the references.

Run as a program, this file is the interpreted part: TRITON_INTERPRET must be set before Triton is imported.
"""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from helpers.kernels.interpreter_process import run_in_interpreter
from helpers.kernels.kernel_cases import (
    DTYPES,
    FP8_DTYPES,
    INPUT_KINDS,
    assert_same_bits,
    gpu,
    make_input,
    needs_cuda,
    run_poisoned,
)
from helpers.kernels.quantize_values import FORMATS, nearest_codes
from hypothesis import given, settings
from hypothesis import strategies as st

from te_dynamo.kernels.layouts.tensor import GroupedForm, TensorForm
from te_dynamo.kernels.quantize.current import (
    MOST_TENSORS,
    partial_amaxes_of,
    partial_amaxes_of_reference,
    quantize,
    quantize_grouped,
    quantize_grouped_reference,
    quantize_reference,
    quantize_stacked,
    quantize_stacked_reference,
)

SHAPES = ((1, 32), (128, 128), (303, 300), (256, 272))


def expected_buffers(x, fp8_dtype, rowwise, columnwise, power_of_two, eps):
    """Buffers by numpy: float32 scale, then the nearest code by search, ties to the even one."""
    fmax = FORMATS[fp8_dtype][2]
    matrix = x.float().reshape(-1, x.shape[-1]).numpy()
    with np.errstate(all="ignore"):
        amax = np.float32(np.abs(matrix).max())
        amax = amax if np.isnan(amax) else max(amax, np.float32(eps))
        scale = np.float32(1)
        if amax != 0 and np.isfinite(amax):
            scale = min(np.float32(fmax) / amax, np.finfo(np.float32).max)
        if power_of_two:
            scale = np.ldexp(np.float32(0.5), np.frexp(scale)[1])
        scaled = (matrix * scale).astype(np.float64)
    codes = nearest_codes(scaled, fp8_dtype)
    padded = np.zeros((codes.shape[1], -(-codes.shape[0] // 16) * 16), np.uint8)
    padded[:, : codes.shape[0]] = codes.T
    buffers = [codes] if rowwise else []
    buffers += [padded] if columnwise else []
    return [
        *(torch.from_numpy(b).view(fp8_dtype) for b in buffers),
        torch.tensor([np.float32(1) / np.float32(scale)]),
    ]


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("kind", ["normal", "constant", "huge"])
def test_reference_equals_torchao(kind, power_of_two):
    """Its tensorwise scale and saturating cast, bit for bit; it has other rules for zeros, denormals, inf and NaN."""
    peer = pytest.importorskip("torchao.float8.float8_utils", reason="torchao is not installed")
    for shape, dtype, fp8_dtype in itertools.product(SHAPES, DTYPES, FP8_DTYPES):
        x = make_input(kind, shape, dtype)
        scale = peer.tensor_to_scale(x, fp8_dtype, round_scales_to_power_of_2=power_of_two)
        data, scale_inv = quantize_reference(x, TensorForm(fp8_dtype, True, False, power_of_two, 0.0))
        assert_same_bits([data], [peer.to_fp8_saturated(x.float() * scale, fp8_dtype)])
        assert scale_inv.item() == (1.0 / scale).item()


@pytest.mark.parametrize("fp8_dtype", FP8_DTYPES, ids=str)
def test_reference_casts_as_torch(fp8_dtype):
    """Every bfloat16 that the format can hold: with amax = fmax the scale is 1."""
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    fmax = torch.finfo(fp8_dtype).max
    x = torch.cat([x[x.abs() <= fmax], torch.tensor([fmax], dtype=torch.bfloat16)]).reshape(1, -1)
    data, scale_inv = quantize_reference(x, TensorForm(fp8_dtype, True, False))
    assert scale_inv.item() == 1.0
    assert_same_bits([data], [x.to(fp8_dtype)])


@pytest.mark.parametrize("kind", INPUT_KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_reference_equals_an_independent_formulation(shape, kind):
    for dtype in DTYPES:
        x = make_input(kind, shape, dtype)
        for fp8_dtype in FP8_DTYPES:
            for rowwise, columnwise, power_of_two, eps in (
                (True, True, False, 0.0),
                (False, True, True, 0.0),
            ):
                options = TensorForm(fp8_dtype, rowwise, columnwise, power_of_two, eps)
                assert_same_bits(quantize_reference(x, options), expected_buffers(x, *dataclasses.astuple(options)))


@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(1, 70),
    columns=st.integers(1, 70),
    exponent=st.integers(-120, 110),
    eps=st.sampled_from([0.0, 1e-3, 1e30]),
    fp8_dtype=st.sampled_from(FP8_DTYPES),
    power_of_two=st.booleans(),
)
def test_reference_on_any_shape_and_magnitude(rows, columns, exponent, eps, fp8_dtype, power_of_two):
    x = torch.ldexp(make_input("normal", (rows, columns), torch.float32, seed=rows), torch.tensor(exponent))
    options = TensorForm(fp8_dtype, True, True, power_of_two, eps)
    assert_same_bits(quantize_reference(x, options), expected_buffers(x, *dataclasses.astuple(options)))


def test_leading_dimensions_are_read_as_rows():
    x = make_input("normal", (2, 3, 5, 32), torch.bfloat16)
    options = TensorForm(torch.float8_e4m3fn, True, True, False, 0.0)
    assert_same_bits(quantize_reference(x, options), quantize_reference(x.reshape(30, 32), options))
    assert_same_bits(quantize_reference(x[0, 0, 0], options), quantize_reference(x[0, 0, :1], options))


def test_given_amax_replaces_the_measured_one():
    x = make_input("normal", (32, 32), torch.bfloat16)
    options = TensorForm(torch.float8_e4m3fn, True, False, False, 0.0)
    amax = x.abs().max().float().reshape(1)
    assert_same_bits(quantize_reference(x, options, amax=amax), quantize_reference(x, options))
    data, scale_inv = quantize_reference(x, options, amax=amax / 4)
    assert torch.equal(scale_inv, 1.0 / (torch.tensor([448.0]) / (amax / 4)))
    assert data.float().abs().max() == 448  # what the given amax does not cover saturates


@pytest.mark.parametrize("fp8_dtype", FP8_DTYPES)
def test_error_is_at_most_half_a_step(fp8_dtype):
    x = make_input("normal", (64, 64), torch.float32).double()
    data, scale_inv = quantize_reference(x.float(), TensorForm(fp8_dtype, True, False))
    info = torch.finfo(fp8_dtype)
    bound = x.abs() * info.eps / 2 + info.smallest_normal * info.eps / 2 * scale_inv.double()
    assert ((data.double() * scale_inv.double() - x).abs() <= bound * (1 + 1e-6)).all()


@gpu
@needs_cuda
@pytest.mark.parametrize("kind", INPUT_KINDS)
@pytest.mark.parametrize("shape", [*SHAPES, (2000, 2000), (17, 4096), (4096, 30), (1, 1), (33, 1)])
def test_kernel_equals_reference(shape, kind):
    for dtype in DTYPES:
        x = make_input(kind, shape, dtype, "cuda")
        for fp8_dtype in FP8_DTYPES:
            for rowwise, columnwise, power_of_two, eps in (
                (True, True, False, 0.0),
                (True, False, True, 0.0),
                (False, True, False, 1e-3),
            ):
                options = TensorForm(fp8_dtype, rowwise, columnwise, power_of_two, eps)
                assert_same_bits(quantize(x, options), quantize_reference(x.cpu(), options))


@gpu
@needs_cuda
@pytest.mark.parametrize("rowwise, columnwise", [(True, True), (True, False), (False, True)])
def test_kernel_equals_reference_at_full_size_and_writes_everything(rowwise, columnwise):
    x = make_input("normal", (8192, 4096), torch.bfloat16, "cuda")
    options = TensorForm(torch.float8_e4m3fn, rowwise, columnwise, False, 0.0)
    assert_same_bits(run_poisoned(lambda: quantize(x, options)), quantize_reference(x, options))


@gpu
@needs_cuda
def test_kernel_takes_a_given_amax_and_any_rank():
    x = make_input("normal", (3, 7, 5, 48), torch.bfloat16, "cuda")
    for amax in (0.0, 0.3, float("inf"), float("nan")):
        amax = torch.tensor([amax], device="cuda")
        for fp8_dtype in FP8_DTYPES:
            options = (TensorForm(fp8_dtype, True, True), amax)
            assert_same_bits(run_poisoned(lambda: quantize(x, *options)), quantize_reference(x, *options))  # noqa: B023


@gpu
@needs_cuda
@pytest.mark.parametrize("shape", [(303, 300), (2000, 2000)])
def test_kernel_writes_every_element_of_ragged_shapes(shape):
    x = make_input("normal", shape, torch.float16, "cuda")
    options = TensorForm(torch.float8_e5m2, True, True, False, 0.0)
    assert_same_bits(run_poisoned(lambda: quantize(x, options)), quantize_reference(x, options))


# -- few values ------------------------------------------------------------------------------------

FEW_SHAPES = ((0, 32), (4, 0), (1, 1), (1, 33), (3, 7, 5, 48), (1, 8193), (4, 4096))


def assert_few_values_equal_the_reference(fp8_dtypes, device: str = "cpu") -> None:
    for shape, kind in itertools.product(FEW_SHAPES, INPUT_KINDS):
        if 0 in shape and kind != "zeros":
            continue  # the others put an element in
        for dtype in DTYPES if shape != FEW_SHAPES[-1] else DTYPES[:1]:
            x = make_input(kind, shape, dtype, device)
            for fp8_dtype in fp8_dtypes:
                for power_of_two, eps in ((False, 0.0), (True, 0.0), (False, 1e-3), (True, 0.3)):
                    options = TensorForm(fp8_dtype, True, False, power_of_two, eps)
                    assert_same_bits(quantize(x, options), quantize_reference(x.cpu(), options))


@gpu
@needs_cuda
def test_kernel_of_few_values_equals_reference():
    assert_few_values_equal_the_reference(FP8_DTYPES, "cuda")


@gpu
@needs_cuda
@pytest.mark.parametrize("shape", [(4, 4096), (1, 8193), (1, 1)])
def test_kernel_of_few_values_writes_every_element(shape):
    x = make_input("normal", shape, torch.bfloat16, "cuda")
    options = TensorForm(torch.float8_e4m3fn, True, False, False, 0.0)
    assert_same_bits(run_poisoned(lambda: quantize(x, options)), quantize_reference(x.cpu(), options))


# -- several tensors, stacks, groups ---------------------------------------------------------------

AMAX_SHAPES = ((128, 48), (0, 48), (1, 1), (3, 4099), (16, 256), (5, 7, 33), (1, 4096), (2, 4097))
AMAX_KINDS = (*INPUT_KINDS, "normal")
USAGES = ((True, True), (True, False), (False, True))


def fresh(device: str):
    """What runs a function; on a GPU twice, on memory that it has to write."""
    return run_poisoned if device == "cuda" else lambda function: function()


def check_amaxes(device: str) -> None:
    form = TensorForm(torch.float8_e4m3fn, True, True, False, 0.0)
    for dtype, count in ((torch.bfloat16, 5), (torch.float32, MOST_TENSORS)):
        kinds = [kind if 0 not in shape else "zeros" for kind, shape in zip(AMAX_KINDS, AMAX_SHAPES, strict=True)]
        xs = [make_input(kind, shape, dtype, device) for kind, shape in zip(kinds, AMAX_SHAPES, strict=True)][-count:]
        (ours,) = fresh(device)(lambda xs=xs: [partial_amaxes_of(xs)])
        expected = partial_amaxes_of_reference([x.cpu() for x in xs])
        assert torch.equal(ours.cpu().amax(1).nan_to_num(-1.0), expected[:, 0].nan_to_num(-1.0)), dtype
        for x, partials in zip(xs, ours, strict=True):
            assert_same_bits(quantize(x, form, partials), quantize_reference(x.cpu(), form), (dtype, x.shape))


def check_stacks(device: str) -> None:
    for by_columns, usage in itertools.product((False, True), USAGES):
        for dtype, sides in ((torch.float32, (128, 256)), (torch.bfloat16, (256, 128, 384))):
            if device == "cpu" and by_columns == (len(sides) == 2):
                continue  # an interpreted launch takes seconds
            shapes = [(19, side) if by_columns else (side, 24) for side in sides]
            xs = [make_input("normal", shape, dtype, device, seed=i) * 9**i for i, shape in enumerate(shapes)]
            form = (xs, TensorForm(torch.float8_e4m3fn, *usage), by_columns)
            known = [xs[0].abs().amax().float().reshape(1), None, partial_amaxes_of(xs[-1:])[0]]
            amaxes = None if len(sides) == 2 else known
            ours = fresh(device)(lambda form=form, amaxes=amaxes: quantize_stacked(*form, amaxes))
            expected = quantize_stacked_reference([x.cpu() for x in xs], *form[1:])
            assert_same_bits(ours, expected, (dtype, by_columns, sides, usage))


def check_groups(device: str) -> None:
    for dtype, usage in zip((torch.bfloat16, torch.float32, torch.float16), USAGES, strict=True):
        x = torch.stack([make_input(kind, (19, 40), dtype, device) for kind in ("normal", "nan", "denormals")])
        form = GroupedForm(torch.float8_e4m3fn, *usage, False, 1e-3)
        ours = fresh(device)(lambda x=x, form=form: quantize_grouped(x, form))
        assert_same_bits(ours, quantize_grouped_reference(x.cpu(), form), (dtype, usage))


CHECKS = {"few": lambda device: assert_few_values_equal_the_reference(FP8_DTYPES[:1], device)}
CHECKS |= {"amaxes": check_amaxes, "stacks": check_stacks, "groups": check_groups}


@gpu
@needs_cuda
@pytest.mark.parametrize("check", [check_amaxes, check_stacks, check_groups])
def test_several_tensors_equal_the_reference_on_a_gpu(check) -> None:
    check("cuda")


@pytest.mark.slow
@pytest.mark.parametrize("check", CHECKS)
def test_kernels_equal_the_reference_in_the_interpreter(check: str) -> None:
    run_in_interpreter(__file__, check)


def main(check: str) -> None:
    from helpers.kernels import interpreted

    interpreted.install()
    np.seterr(all="ignore")
    CHECKS[check]("cpu")


if __name__ == "__main__":
    import sys

    main(sys.argv[1])
