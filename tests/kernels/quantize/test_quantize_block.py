"""Float8 block scaling: the reference against an independent formulation, the kernel against the reference."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
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

from te_dynamo.kernels.layouts.block import BlockForm
from te_dynamo.kernels.quantize.float8_block import quantize_block, quantize_block_reference

E4M3 = torch.float8_e4m3fn
SHAPES = ((1, 32), (128, 128), (128, 256), (303, 300), (256, 272), (2000, 2000))
USAGES = ((True, True), (True, False), (False, True))
KINDS = (*INPUT_KINDS, "zero row")


def block_input(kind: str, shape, dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
    """`make_input`, or normal values with one row and one column of zeros."""
    if kind != "zero row":
        return make_input(kind, shape, dtype, device)
    x = make_input("normal", shape, dtype, device)
    x[shape[0] // 2] = 0
    x[:, shape[1] // 2] = 0
    return x


# --- an independent formulation -----------------------------------------------------------------------------


def one_scale(block: np.ndarray, fmax: float, largest: float, power_of_two: bool, eps: float) -> float:
    """The scale of one block of float64 values that fp32 holds, by exact arithmetic rounded once to fp32."""
    amax = np.abs(block).max()
    if np.isnan(amax) or np.isinf(amax):
        return 1.0
    amax = max(amax, float(np.float32(eps)))
    if amax == 0:
        return 1.0
    quotient = float(np.float32(fmax / amax))
    quotient = largest if np.isinf(quotient) else quotient
    return 2.0 ** (np.frexp(quotient)[1] - 1) if power_of_two else quotient


def expected_rowwise(matrix: np.ndarray, fp8_dtype, two_d, power_of_two, eps, largest) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scale_inv of a float64 matrix, block by block."""
    rows, columns = matrix.shape
    height = 128 if two_d else 1
    grid = np.zeros((-(-rows // height), -(-columns // 128)), np.float32)
    codes = np.zeros((rows, columns), np.uint8)
    for i in range(grid.shape[0]):
        for j in range(grid.shape[1]):
            place = slice(i * height, (i + 1) * height), slice(j * 128, (j + 1) * 128)
            scale = one_scale(matrix[place], FORMATS[fp8_dtype][2], largest, power_of_two, eps)
            grid[i, j] = np.float32(1 / scale)
            codes[place] = nearest_codes((matrix[place] * scale).astype(np.float32).astype(np.float64), fp8_dtype)
    grid = grid if two_d else grid.T
    padded = np.zeros((grid.shape[0], -(-grid.shape[1] // 4) * 4), np.float32)
    padded[:, : grid.shape[1]] = grid
    return codes, padded


def expected_buffers(x, fp8_dtype, rowwise, columnwise, two_d, power_of_two, eps) -> list[torch.Tensor]:
    matrix = x.double().reshape(-1, x.shape[-1]).numpy()
    options = (fp8_dtype, two_d, power_of_two, eps, torch.finfo(x.dtype).max)
    buffers = []
    with np.errstate(all="ignore"):
        if rowwise:
            codes, scale_inv = expected_rowwise(matrix, *options)
            buffers += [torch.from_numpy(codes).view(fp8_dtype), torch.from_numpy(scale_inv)]
        if columnwise:
            codes, scale_inv = expected_rowwise(matrix.T, *options)
            padded = np.zeros((codes.shape[0], -(-codes.shape[1] // 16) * 16), np.uint8)
            padded[:, : codes.shape[1]] = codes
            buffers += [torch.from_numpy(padded).view(fp8_dtype), torch.from_numpy(scale_inv)]
    return buffers


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(1, 32), pytest.param((128, 256), marks=pytest.mark.slow), (135, 300)])
def test_reference_equals_an_independent_formulation(shape, kind):
    """The slow shape finds what goes wrong where there is no ragged block."""
    for dtype in DTYPES:
        x = block_input(kind, shape, dtype)
        for two_d, power_of_two, eps, fp8_dtype in ((False, True, 0.0, E4M3), (True, False, 1e-3, torch.float8_e5m2)):
            options = BlockForm(fp8_dtype, True, True, two_d, power_of_two, eps)
            assert_same_bits(quantize_block_reference(x, options), expected_buffers(x, *dataclasses.astuple(options)))


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_reference_equals_an_independent_formulation_everywhere(shape, kind):
    for dtype in DTYPES if max(shape) < 2000 else DTYPES[:1]:
        x = block_input(kind, shape, dtype)
        for two_d in (False, True):
            for fp8_dtype, power_of_two, eps in ((E4M3, True, 0.0), (torch.float8_e5m2, False, 0.0), (E4M3, True, 0.3)):
                options = BlockForm(fp8_dtype, True, True, two_d, power_of_two, eps)
                assert_same_bits(
                    quantize_block_reference(x, options), expected_buffers(x, *dataclasses.astuple(options))
                )


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 150),
    columns=st.integers(1, 150),
    exponent=st.integers(-130, 110),
    eps=st.sampled_from([0.0, 1e-3, 1e30]),
    fp8_dtype=st.sampled_from(FP8_DTYPES),
    two_d=st.booleans(),
    power_of_two=st.booleans(),
    usage=st.sampled_from(USAGES),
)
def test_reference_on_any_shape_and_magnitude(rows, columns, exponent, eps, fp8_dtype, two_d, power_of_two, usage):
    x = torch.ldexp(make_input("normal", (rows, columns), torch.float32, seed=rows), torch.tensor(exponent))
    options = BlockForm(fp8_dtype, *usage, two_d, power_of_two, eps)
    assert_same_bits(quantize_block_reference(x, options), expected_buffers(x, *dataclasses.astuple(options)))


def test_leading_dimensions_are_read_as_rows():
    x = make_input("normal", (2, 3, 5, 32), torch.bfloat16)
    for two_d in (False, True):
        options = BlockForm(E4M3, True, True, two_d, True, 0.0)
        assert_same_bits(quantize_block_reference(x, options), quantize_block_reference(x.reshape(30, 32), options))
        assert_same_bits(quantize_block_reference(x[0, 0, 0], options), quantize_block_reference(x[0, 0, :1], options))


def test_columns_are_quantized_on_their_own_or_share_the_blocks():
    x = make_input("normal", (256, 384), torch.bfloat16)
    for two_d in (False, True):
        options = (two_d, True, 0.0)
        data, _, transpose, columnwise_scale_inv = quantize_block_reference(x, BlockForm(E4M3, True, True, *options))
        by_columns = quantize_block_reference(x.t().contiguous(), BlockForm(E4M3, True, False, *options))
        assert_same_bits([transpose, columnwise_scale_inv], by_columns)
        assert torch.equal(data.view(torch.uint8), transpose.view(torch.uint8).t()) == two_d


@pytest.mark.parametrize("two_d", [False, True])
def test_error_is_at_most_half_a_step(two_d):
    x = make_input("normal", (256, 256), torch.float32)
    data, scale_inv = quantize_block_reference(x, BlockForm(E4M3, True, False, two_d, True, 0.0))
    scales = scale_inv[:, :2].repeat_interleave(128, 0) if two_d else scale_inv.t()
    scales = scales.repeat_interleave(128, 1).double()
    info = torch.finfo(E4M3)
    bound = x.double().abs() * info.eps / 2 + info.smallest_normal * info.eps / 2 * scales
    assert ((data.double() * scales - x.double()).abs() <= bound * (1 + 1e-6)).all()


# --- the kernel, on a GPU -----------------------------------------------------------------------------------


@gpu
@needs_cuda
@pytest.mark.parametrize("two_d", [False, True], ids=["1x128", "128x128"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [*SHAPES, (17, 4096), (131, 136), (4096, 30), (1, 1), (33, 1), (130, 129)])
def test_kernel_equals_reference(shape, kind, two_d):
    for dtype in DTYPES:
        x = block_input(kind, shape, dtype, "cuda")
        for fp8_dtype in FP8_DTYPES:
            for usage in USAGES:
                for power_of_two, eps in ((True, 0.0), (True, 1e-3), (False, 0.0)):
                    options = BlockForm(fp8_dtype, *usage, two_d, power_of_two, eps)
                    assert_same_bits(quantize_block(x, options), quantize_block_reference(x, options))


@gpu
@needs_cuda
@pytest.mark.parametrize("tile", [(128, 4, 1), (128, 8, 8), (128, 16, 4)], ids=str)
def test_every_tile_gives_the_same_bits(tile):
    for dtype in DTYPES:
        x = block_input("zero row", (303, 520), dtype, "cuda")
        for two_d in (False, True):
            options = BlockForm(E4M3, True, True, two_d, True, 0.0)
            assert_same_bits(quantize_block(x, options, tile=tile), quantize_block_reference(x, options))


@gpu
@needs_cuda
@pytest.mark.parametrize("usage", USAGES, ids=str)
@pytest.mark.parametrize("two_d", [False, True], ids=["1x128", "128x128"])
@pytest.mark.parametrize("shape", [(8192, 4096), (303, 300), (2000, 2000), (3, 7, 5, 48)], ids=str)
def test_kernel_writes_everything(shape, two_d, usage):
    for dtype in (torch.bfloat16, torch.float32):
        x = make_input("normal", shape, dtype, "cuda")
        options = BlockForm(E4M3, *usage, two_d, True, 0.0)
        assert_same_bits(run_poisoned(lambda: quantize_block(x, options)), quantize_block_reference(x, options))  # noqa: B023


@gpu
@needs_cuda
@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 700),
    columns=st.integers(1, 700),
    exponent=st.integers(-130, 110),
    two_d=st.booleans(),
    power_of_two=st.booleans(),
    dtype=st.sampled_from(DTYPES),
)
def test_kernel_on_any_shape_and_magnitude(rows, columns, exponent, two_d, power_of_two, dtype):
    x = torch.ldexp(make_input("normal", (rows, columns), torch.float32, seed=rows), torch.tensor(exponent))
    x = x.to(dtype).cuda()
    options = BlockForm(E4M3, True, True, two_d, power_of_two, 0.0)
    assert_same_bits(quantize_block(x, options), quantize_block_reference(x, options))


@gpu
@needs_cuda
def test_scales_near_the_ends_of_their_range():
    """Amaxes around every power of two and around 1.75 times one, where the power-of-two scale changes."""
    exponents = torch.arange(-149, 128, dtype=torch.float64)
    steps = torch.tensor([1.0, 1.75 - 2**-22, 1.75, 1.75 + 2**-22, 2.0 - 2**-23], dtype=torch.float64)
    x = torch.zeros(exponents.numel() * steps.numel(), 128, device="cuda")
    x[:, 5] = (2.0 ** exponents[:, None] * steps[None, :]).reshape(-1).float().cuda()
    for fp8_dtype in FP8_DTYPES:
        for power_of_two in (True, False):
            options = BlockForm(fp8_dtype, True, False, False, power_of_two, 0.0)
            assert_same_bits(quantize_block(x, options), quantize_block_reference(x, options))
            assert_same_bits(quantize_block_reference(x, options), quantize_block_reference(x.cpu(), options))


@gpu
@needs_cuda
@pytest.mark.parametrize("power_of_two, eps", [(True, 0.0), (True, 1e-3), (True, 1e30), (False, 0.0)])
def test_every_bfloat16_as_amax(power_of_two, eps):
    """Two rows share a word of amaxes, and so do two columns."""
    amax = torch.arange(1 << 15, dtype=torch.int16, device="cuda").view(torch.bfloat16)
    for shape in ((1 << 15, 128), (128, 1 << 15)):
        x = torch.zeros(shape, device="cuda", dtype=torch.bfloat16)
        rows = x if shape[1] == 128 else x.t()
        rows[:, 77] = amax
        rows[:, 3] = -amax * 0.4375
        for fp8_dtype in FP8_DTYPES:
            for two_d in (False, True):
                options = BlockForm(fp8_dtype, True, True, two_d, power_of_two, eps)
                assert_same_bits(quantize_block(x, options), quantize_block_reference(x, options))


@gpu
@needs_cuda
def test_an_empty_tensor_has_empty_buffers():
    for two_d in (False, True):
        options = BlockForm(E4M3, True, True, two_d, True, 0.0)
        x = torch.empty(0, 256, device="cuda", dtype=torch.bfloat16)
        assert_same_bits(quantize_block(x, options), quantize_block_reference(x, options))
