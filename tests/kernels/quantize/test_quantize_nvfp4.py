"""NVFP4: the references against independent formulations, the kernels against the references."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from helpers.kernels.gemms import gemm_nvfp4, gemm_nvfp4_reference
from helpers.kernels.kernel_cases import (
    DTYPES,
    assert_same_bits,
    gpu,
    needs_cuda,
    run_poisoned,
)
from helpers.kernels.nvfp4_cases import (
    BOTH,
    COLUMN,
    GRADIENT,
    HADAMARD,
    KEY,
    KINDS,
    OPTIONS,
    PLAIN,
    ROW,
    STOCHASTIC,
    TWO_D,
    kernel,
    make,
    reference,
    special_inputs,
)
from hypothesis import example, given, settings
from hypothesis import strategies as st

from te_dynamo.kernels.layouts.nvfp4 import NVFP4Form
from te_dynamo.kernels.quantize.nvfp4 import (
    HADAMARD_SIGNS,
    dequantize_nvfp4,
    dequantize_nvfp4_reference,
    hadamard_reference,
    quantize_nvfp4_reference,
)
from te_dynamo.kernels.quantize.nvfp4_kernels import HIGH_ROTATIONS, LOW_ROTATIONS

SHAPES = ((1, 32), (128, 128), (128, 256), (303, 300), (256, 272))
LARGER_SHAPES = ((1024, 256), (2000, 2000), (17, 4096), (4096, 30), (1, 1), (33, 1), (1, 4096))
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])

# -- an independent formulation, in numpy ----------------------------------------------------------


def e4m3_values() -> np.ndarray:
    """The finite non-negative values in the order of their codes, from the bit fields."""
    codes = np.arange(127)
    exponent, mantissa = codes >> 3, codes & 7
    return np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))


def nearest_code(values: np.ndarray, magnitude: np.ndarray) -> np.ndarray:
    """Index of the value nearest to each finite magnitude, ties to the even index, in float64."""
    magnitude = np.minimum(magnitude.astype(np.float64), values[-1])
    upper = np.clip(np.searchsorted(values, magnitude), 1, len(values) - 1)
    middle = (values[upper - 1] + values[upper]) / 2
    up = (magnitude > middle) | ((magnitude == middle) & (upper % 2 == 0))
    return np.where(up, upper, upper - 1)


def stochastic_code(magnitude: np.ndarray, bits: np.ndarray) -> np.ndarray:
    """Index in E2M1 of the neighbour of each fp32 magnitude that nine random bits choose, in float64."""
    magnitude = magnitude.astype(np.float64)
    unit = np.exp2(np.maximum(np.floor(np.log2(np.clip(magnitude, 1e-300, 8))), 0) - 10)  # 2^-9 of a step
    magnitude = np.rint(magnitude / unit) * unit  # one fp16 rounding, as of a number that is subnormal below 1
    magnitude = np.minimum(magnitude, 6.0)
    lower = np.clip(np.searchsorted(E2M1, magnitude, side="right") - 1, 0, 6)
    distance = (magnitude - E2M1[lower]) / (E2M1[lower + 1] - E2M1[lower])
    return lower + (distance + bits / 2.0**9 >= 1)


def hashed_words(key: torch.Tensor, blocks: int) -> tuple[np.ndarray, np.ndarray]:
    """The 64 bits of each block, the low and the high 32, in numpy's wrapping integers."""
    first, second = key.numpy().view(np.uint32)
    h = np.arange(blocks, dtype=np.uint32) * np.uint32(0x9E3779B1) + first
    h = (h ^ (h >> np.uint32(16))) * np.uint32(0x7FEB352D)
    product = (h ^ (h >> np.uint32(15)) ^ second).astype(np.uint64) * np.uint64(0x846CA68B)
    return product.astype(np.uint32), (product >> np.uint64(32)).astype(np.uint32)


def hashed(key: torch.Tensor, blocks: int) -> np.ndarray:
    """The nine bits of each of 16 * blocks elements, found bit by bit."""
    low, high = hashed_words(key, blocks)
    elements = []
    for second, half, first in itertools.product(HIGH_ROTATIONS, (0, 16), LOW_ROTATIONS):
        places = np.arange(half, half + 9)
        of_low = low[:, None] >> ((places - first) % 32).astype(np.uint32)
        of_high = high[:, None] >> ((places - second) % 32).astype(np.uint32)
        elements.append((((of_low ^ of_high) & 1).astype(np.int64) << np.arange(9)).sum(-1))
    return np.stack(elements, axis=-1)


def sylvester() -> np.ndarray:
    h = np.ones((1, 1))
    for _ in range(4):
        h = np.block([[h, h], [h, -h]])
    return h


def expected_usage(matrix: np.ndarray, two_d: bool, key: torch.Tensor | None) -> list[torch.Tensor]:
    """The three buffers of an fp32 matrix, block by block."""
    f = np.float32
    rows, columns = matrix.shape
    wide = -(-columns // 16)
    step = 16 if two_d else 1
    biggest = np.finfo(f).max
    amax = np.abs(matrix).max()
    scale_s = f(1) if amax == 0 or np.isinf(amax) else np.fmin(f(2688) / amax, biggest) if amax == amax else f(np.nan)
    padded = np.zeros((-(-rows // step) * step, wide * 16), f)
    padded[:rows, :columns] = matrix
    codes = np.zeros(padded.shape, np.uint8)
    scales = np.zeros((-(-rows // 128) * 128, -(-wide // 4) * 4), np.uint8)
    bits = None if key is None else hashed(key, rows * wide).reshape(rows, wide * 16)
    sixth, inverse = scale_s * f(1 / 6), f(1) / scale_s
    table = e4m3_values()
    for i, j in itertools.product(range(0, padded.shape[0], step), range(wide)):
        block = padded[i : i + step, j * 16 : j * 16 + 16]
        if np.isnan(amax):
            code, enc = 0x7F, f(0)
        else:
            code = nearest_code(table, np.minimum(np.abs(block).max() * sixth, f(448)))
            enc = np.minimum(f(1) / (f(table[code]) * inverse), biggest)
        if np.isnan(amax):
            block = np.zeros_like(block)
        if bits is None:
            quantized = nearest_code(E2M1, np.minimum(np.abs(block * enc), 6))
        else:
            quantized = np.zeros_like(block, np.int64)
            inside = bits[i : i + step, j * 16 : j * 16 + 16]
            quantized[: len(inside)] = stochastic_code(np.abs(block[: len(inside)]) * enc, inside)
        codes[i : i + step, j * 16 : j * 16 + 16] = quantized | np.where(np.signbit(block), 8, 0)
        scales[i : min(i + step, rows), j] = code
    data = np.zeros((rows, -(-columns // 32) * 16), np.uint8)
    data[:, : wide * 8] = codes[:rows, 0::2] | codes[:rows, 1::2] << 4
    return [torch.from_numpy(data), torch.from_numpy(scales), torch.tensor([amax])]


def expected_buffers(x: torch.Tensor, usages, options, key: torch.Tensor) -> list[torch.Tensor]:
    two_d, hadamard, stochastic = options
    matrix = x.float().reshape(-1, x.shape[-1]).numpy()
    buffers = []
    with np.errstate(all="ignore"):
        if usages[0]:
            buffers += expected_usage(matrix, two_d, key if stochastic else None)
        if usages[1]:
            turned = np.ascontiguousarray(matrix.T)
            if hadamard:  # its additions are tested below: here they only have to be the same ones
                turned = hadamard_reference(torch.from_numpy(turned)).numpy()
            buffers += expected_usage(turned, two_d, key.flip(0) if stochastic else None)
    return buffers


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(1, 32), (35, 50), pytest.param((128, 128), marks=pytest.mark.slow)])
def test_reference_equals_an_independent_formulation(shape, kind) -> None:
    for dtype, options in itertools.product(DTYPES, OPTIONS):
        x = make(kind, shape, dtype)
        assert_same_bits(reference(x, BOTH, options), expected_buffers(x, BOTH, options, KEY))


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(128, 256), (303, 300), (256, 272), (400, 560)])
def test_reference_equals_an_independent_formulation_on_larger_shapes(shape) -> None:
    for options in (PLAIN, TWO_D, GRADIENT):
        x = make("normal", shape, torch.bfloat16)
        assert_same_bits(reference(x, BOTH, options), expected_buffers(x, BOTH, options, KEY))


@settings(max_examples=30, deadline=None)
@given(
    rows=st.integers(1, 70),
    columns=st.integers(1, 70),
    exponent=st.integers(-145, 120),
    options=st.sampled_from(OPTIONS),
    key=st.tuples(*[st.integers(-(2**31), 2**31 - 1)] * 2),
)
def test_reference_on_any_shape_and_magnitude(rows, columns, exponent, options, key) -> None:
    x = torch.ldexp(make("normal", (rows, columns), torch.float32, seed=rows), torch.tensor(exponent))
    bits = torch.tensor(key, dtype=torch.int32)
    assert_same_bits(reference(x, BOTH, options, bits), expected_buffers(x, BOTH, options, bits))


def test_every_tie_goes_to_the_even_code() -> None:
    tied = {0.25: 0.0, 0.75: 1.0, 1.25: 1.0, 1.75: 2.0, 2.5: 2.0, 3.5: 4.0, 5.0: 4.0}
    above = {0.25: 0.5, 0.75: 1.0, 1.25: 1.5, 1.75: 2.0, 2.5: 3.0, 3.5: 4.0, 5.0: 6.0}
    below = {0.25: 0.0, 0.75: 0.5, 1.25: 1.0, 1.75: 1.5, 2.5: 2.0, 3.5: 3.0, 5.0: 4.0}
    for towards, expected in ((None, tied), (9.0, above), (0.0, below)):
        ties = torch.tensor(list(expected))
        x = ties if towards is None else ties.nextafter(torch.tensor(towards))
        # With amax 6 both scales are exact, and enc is 1: what is left is the elements' rounding.
        x = torch.cat([torch.tensor([6.0]), x, -x, torch.tensor([-0.0])]).reshape(1, 16)
        data, scale_inv, _ = reference(x, ROW, PLAIN)
        values = dequantize_nvfp4_reference(data, scale_inv, None, 16, torch.float32)[0] / 448
        assert values[1:8].tolist() == list(expected.values())
        assert values[8:15].tolist() == [-value for value in expected.values()]
        assert values[15] == 0 and values[15].signbit()


def test_usages_are_independent_and_leading_dimensions_are_rows() -> None:
    x = make("normal", (2, 3, 7, 40), torch.bfloat16)
    for options in OPTIONS:
        both = reference(x.reshape(42, 40), BOTH, options)
        assert_same_bits(reference(x, ROW, options), both[:3])
        assert_same_bits(reference(x, COLUMN, options), both[3:])
    transposed = reference(x.reshape(42, 40).t().contiguous(), ROW, PLAIN)
    assert_same_bits(reference(x, COLUMN, PLAIN), transposed)


def test_two_d_columns_are_the_transpose_of_rows() -> None:
    x = make("normal", (48, 80), torch.float32)
    row = dequantize_nvfp4_reference(*(b := reference(x, BOTH, TWO_D))[:3], 80, torch.float32)
    assert torch.equal(row.t(), dequantize_nvfp4_reference(*b[3:], 48, torch.float32))


def test_padding_is_zero() -> None:
    for options, kind in itertools.product((PLAIN, TWO_D, STOCHASTIC), ("normal", "inf", "nan")):
        data, scale_inv, _, columnwise_data, columnwise_scale_inv, _ = reference(
            make(kind, (35, 50), torch.bfloat16), BOTH, options
        )
        assert data.shape == (35, 32) and columnwise_data.shape == (50, 32)
        assert scale_inv.shape == columnwise_scale_inv.shape == (128, 4)
        assert not data[:, 25:].any() and not columnwise_data[:, 18:].any() and not (columnwise_data[:, 17] >> 4).any()
        assert (
            not scale_inv[35:].any() and not columnwise_scale_inv[50:].any() and not columnwise_scale_inv[:, 3:].any()
        )


@pytest.mark.parametrize("shape", [(64, 64), (303, 300)])
def test_error_is_at_most_half_a_step(shape) -> None:
    """A block's scale is off by at most 1/16, its steps at the top are 2 of 6, so the error is below amax * 17/16 / 6."""
    x = make("normal", shape, torch.float32)
    for options in (PLAIN, TWO_D):
        data, scale_inv, amax, *_ = reference(x, ROW, options)
        values = dequantize_nvfp4_reference(data, scale_inv, amax, shape[1], torch.float32).double()
        scale = scale_inv[: shape[0], : -(-shape[1] // 16)].view(torch.float8_e4m3fn).double()
        step = (scale * amax.double() / 2688).repeat_interleave(16, dim=1)[:, : shape[1]]
        magnitude = x.abs() / step
        half = torch.where(magnitude < 2, 0.25, torch.where(magnitude < 4, 0.5, 1.0))
        assert ((values - x.double()).abs() <= step * half * (1 + 1e-5)).all()


# -- Hadamard --------------------------------------------------------------------------------------


def test_hadamard_is_the_orthogonal_matrix_that_the_module_names() -> None:
    matrix = np.diag(HADAMARD_SIGNS) @ sylvester() / 4
    assert np.array_equal(matrix @ matrix.T, np.eye(16))
    x = torch.randn(40, 64, dtype=torch.float32, generator=torch.Generator().manual_seed(0))
    exact = (x.double().reshape(40, 4, 16) @ torch.from_numpy(matrix)).reshape(40, 64)
    assert (hadamard_reference(x).double() - exact).abs().max() < 2e-6
    assert torch.equal(hadamard_reference(torch.eye(16)).double(), torch.from_numpy(matrix))
    assert torch.allclose(hadamard_reference(hadamard_reference(x), inverse=True), x, atol=2e-6)


@pytest.mark.parametrize("tokens", [64, 303, 5])
def test_product_of_two_transformed_operands_needs_no_inverse(tokens) -> None:
    generator = torch.Generator().manual_seed(0)
    dy, x = (torch.randn(tokens, n, generator=generator, dtype=torch.float32) for n in (24, 40))
    exact = dy.double().t() @ x.double()
    turned = hadamard_reference(dy.t()).double() @ hadamard_reference(x.t()).double().t()
    assert (turned - exact).abs().max() < 1e-5 * exact.abs().max()
    # And through the format: wgrad of quantized operands, transformed or not, has the error of two 4-bit operands.
    for options in (PLAIN, HADAMARD, GRADIENT):
        operands = (*reference(dy, COLUMN, options), *reference(x, COLUMN, options))
        wgrad = gemm_nvfp4_reference(*operands, None, torch.float32).double()
        assert (wgrad - exact).norm() < (0.25 if options[2] else 0.18) * exact.norm()


def test_zeros_keep_their_signs_through_the_transform() -> None:
    """The product with a sign is exact, of zeros too: sums of -0 alone are -0, all others +0."""
    data, _, amax = reference(make("signed_zeros", (16, 16), torch.float32), COLUMN, HADAMARD)
    codes = torch.stack([data & 15, data >> 4], dim=-1).flatten(1)[:, :16]
    assert amax == 0 and torch.equal(codes, 8 * torch.eye(16, dtype=torch.uint8))


def test_hadamard_spreads_an_outlier() -> None:
    x = torch.full((16, 1), 0.01)
    x[3] = 100.0
    data, _, amax = reference(x, COLUMN, HADAMARD)
    assert 20 < amax < 30 and not reference(x, ROW, PLAIN)[2].allclose(amax)
    assert ((data[:, :8] & 7) != 0).all()


# -- dequantize, GEMM ------------------------------------------------------------------------------


def test_elements_times_scales_are_exact_in_bfloat16() -> None:
    codes = torch.arange(256, dtype=torch.uint8).reshape(1, 256).expand(127, 256).contiguous()
    scale = torch.arange(127, dtype=torch.uint8).reshape(127, 1).expand(127, 32)
    scale = torch.nn.functional.pad(scale, (0, 0, 0, 1)).contiguous()
    exact = dequantize_nvfp4_reference(codes, scale, None, 512, torch.float64)
    assert torch.equal(dequantize_nvfp4_reference(codes, scale, None, 512, torch.bfloat16).double(), exact)
    table = torch.from_numpy(np.concatenate([E2M1, -E2M1]))
    expected = torch.stack([table[codes.long() & 15], table[codes.long() >> 4]], -1).flatten(1)
    assert torch.equal(exact, expected * torch.from_numpy(e4m3_values())[:, None])


@pytest.mark.parametrize("m, n, k", [(128, 256, 96), (64, 128, 64), (35, 70, 50)])
def test_gemm_equals_float64_of_what_the_operands_hold(m, n, k) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(*shape, generator=generator) for shape in ((m, k), (n, k), (n,)))
    a, b = reference(x, ROW, PLAIN), reference(weight, ROW, TWO_D)
    values = [dequantize_nvfp4_reference(*operand, k, torch.float64) for operand in (a, b)]
    exact = values[0] @ values[1].t()
    for dtype in DTYPES:
        for added in (None, bias.to(dtype)):
            expected = exact if added is None else exact + added.double()
            actual = gemm_nvfp4_reference(*a, *b, added, dtype)
            tolerance = torch.finfo(dtype).eps if dtype != torch.float32 else 1e-5
            assert actual.dtype == dtype
            assert ((actual.double() - expected).abs() <= tolerance * (expected.abs() + exact.abs().max() / 16)).all()


@pytest.mark.parametrize("kind", ["inf", "nan"])
def test_what_is_not_finite_reaches_the_product(kind) -> None:
    a = reference(make(kind, (32, 64), torch.bfloat16), ROW, PLAIN)
    b = reference(make("normal", (48, 64), torch.bfloat16), ROW, TWO_D)
    assert not gemm_nvfp4_reference(*a, *b, None, torch.bfloat16).isfinite().any()
    assert not dequantize_nvfp4_reference(*a, 64, torch.float32).isfinite().all()


def test_bad_input_is_named() -> None:
    x = torch.randn(32, 32)
    with pytest.raises(ValueError, match="16x16 blocks share scales"):
        NVFP4Form(True, True, two_d=True, hadamard=True)
    for random in (None, torch.zeros(4, dtype=torch.int32), torch.zeros(2)):
        with pytest.raises(ValueError, match="stochastic rounding takes `random`, int32"):
            quantize_nvfp4_reference(x, NVFP4Form(True, True, stochastic_rounding=True), random)
    a, b = reference(x, ROW, PLAIN), reference(torch.randn(32, 64), ROW, PLAIN)
    with pytest.raises(ValueError, match=r"expected a \[M, K/2\] and b \[N, K/2\], got \(32, 16\) and \(32, 32\)"):
        gemm_nvfp4_reference(*a, *b, None, torch.bfloat16)
    with pytest.raises(ValueError, match=r"expected bias \[32\], got \(31,\)"):
        gemm_nvfp4_reference(*a, *a, torch.zeros(31), torch.bfloat16)
    with pytest.raises(ValueError, match="out_dtype must be"):
        gemm_nvfp4_reference(*a, *a, None, torch.int32)
    with pytest.raises(ValueError, match="uint8 tensors"):
        gemm_nvfp4_reference(a[0].view(torch.int8), *a[1:], *a, None, torch.bfloat16)


# -- on the GPU ------------------------------------------------------------------------------------


@gpu
@needs_cuda
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, *LARGER_SHAPES], ids=str)
def test_kernel_equals_reference(shape, options) -> None:
    """All kinds of input in one test: several processes would compile the same kernels at once."""
    for kind, dtype in itertools.product(KINDS, DTYPES):
        x = make(kind, shape, dtype, "cuda")
        for usages in (ROW, COLUMN, BOTH):
            assert_same_bits(kernel(x, usages, options), reference(x, usages, options), (kind, dtype, usages))


@gpu
@needs_cuda
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_kernel_equals_reference_at_the_edges_of_the_rules(options) -> None:
    for name, x in special_inputs().items():
        assert_same_bits(kernel(x.cuda(), BOTH, options), reference(x.cuda(), BOTH, options), name)


@gpu
@needs_cuda
@pytest.mark.parametrize("kind", KINDS)
def test_reference_is_the_same_on_both_devices(kind) -> None:
    for shape in (*SHAPES, *LARGER_SHAPES):
        x = make(kind, shape, torch.float32)
        assert_same_bits(reference(x.cuda(), BOTH, GRADIENT), reference(x, BOTH, GRADIENT), shape)


@gpu
@needs_cuda
@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 400),
    columns=st.integers(1, 400),
    exponent=st.integers(-145, 120),
    dtype=st.sampled_from(DTYPES),
    options=st.sampled_from(OPTIONS),
)
@example(rows=5, columns=1, exponent=-25, dtype=torch.float16, options=HADAMARD)  # zeros of both signs
def test_kernel_on_any_shape_and_magnitude(rows, columns, exponent, dtype, options) -> None:
    x = torch.ldexp(make("normal", (rows, columns), torch.float32, seed=rows), torch.tensor(exponent)).to(dtype).cuda()
    assert_same_bits(kernel(x, BOTH, options), reference(x, BOTH, options))


@gpu
@needs_cuda
@pytest.mark.parametrize("options", OPTIONS)
def test_kernel_equals_reference_at_full_size_and_writes_everything(options) -> None:
    for shape in ((8192, 4096), (303, 300)):
        x = make("normal", shape, torch.bfloat16, "cuda")
        assert_same_bits(run_poisoned(lambda: kernel(x, BOTH, options)), reference(x, BOTH, options))  # noqa: B023


@gpu
@needs_cuda
@pytest.mark.parametrize("shape", [(128, 256), (303, 300), (1, 32), (8192, 4096)])
def test_dequantize_kernel_equals_reference(shape) -> None:
    for kind, options in itertools.product(("normal", "nan", "denormals"), (PLAIN, TWO_D)):
        buffers = reference(make(kind, shape, torch.bfloat16, "cuda"), ROW, options)
        for columns, dtype in itertools.product((shape[1], 2 * buffers[0].shape[1]), DTYPES):
            for amax in (None, buffers[2]):
                arguments = (*buffers[:2], amax, columns, dtype)
                actual, expected = dequantize_nvfp4(*arguments), dequantize_nvfp4_reference(*arguments)
                assert torch.equal(actual.isnan(), expected.isnan())
                assert_same_bits([actual.nan_to_num(nan=0.0)], [expected.nan_to_num(nan=0.0)])


@gpu
@needs_cuda
@pytest.mark.parametrize("m, n, k", [(128, 256, 96), (64, 128, 64), (35, 70, 50), (2048, 4096, 4096)])
def test_gemm_equals_reference(m, n, k) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    x, weight, bias = (torch.randn(*s, generator=generator, device="cuda") for s in ((m, k), (n, k), (n,)))
    a, b = kernel(x, ROW, PLAIN), kernel(weight, ROW, TWO_D)
    values = [dequantize_nvfp4_reference(*operand, k, torch.float64) for operand in (a, b)]
    exact = values[0] @ values[1].t()
    for dtype, added in itertools.product(DTYPES, (None, bias)):
        expected = exact if added is None else exact + added.double()
        actual = gemm_nvfp4(*a, *b, added, dtype)
        tolerance = torch.finfo(dtype).eps if dtype != torch.float32 else 1e-5
        assert actual.dtype == dtype
        assert ((actual.double() - expected).abs() <= tolerance * (expected.abs() + exact.abs().max() / 16)).all()
