"""MXFP8: the reference against exact arithmetic and against torchao, the kernels against the reference."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from helpers.kernels.gemms import gemm_mxfp8, gemm_mxfp8_reference
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
from helpers.slow import slow_but
from hypothesis import given, settings
from hypothesis import strategies as st

from te_dynamo.kernels.layouts.mxfp8 import SCALE_BLOCKS, MXFP8Form
from te_dynamo.kernels.layouts.tiled_scales import plain_scales
from te_dynamo.kernels.quantize.mxfp8 import (
    dequantize_mxfp8,
    dequantize_mxfp8_reference,
    quantize_mxfp8,
    quantize_mxfp8_reference,
    row_tile,
)

E4M3 = torch.float8_e4m3fn
SHAPES = ((1, 32), (128, 128), (128, 256), (303, 300), (256, 272), (2000, 2000))
KINDS = (*INPUT_KINDS, "zero_row")
USAGES = ((True, True), (True, False), (False, True))
BLOCKS = tuple(itertools.product(SCALE_BLOCKS, (False, True)))
"""(scale_block, two_d)."""


def make(kind: str, shape: tuple[int, ...], dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
    """`make_input`, and normal values with a row and a column of zeros."""
    if kind != "zero_row":
        return make_input(kind, shape, dtype, device)
    x = make_input("normal", shape, dtype, device)
    x[shape[0] // 2] = 0.0
    x[:, shape[1] // 2] = 0.0
    return x


# --- exact formulation --------------------------------------------------------------------------------------


def expected_rows(x: np.ndarray, form: MXFP8Form) -> tuple[np.ndarray, np.ndarray]:
    """(data codes [R, C], scale codes (R^128, ceil(C/32)^4)) of float64 x, in blocks along its rows, by exact arithmetic.

    A scale code is the smallest e with amax <= fmax * 2^(e - 127); an element is the nearest value, ties to the even code.
    """
    fp8_dtype, scale_block = form.dtype, form.scale_block
    fmax = FORMATS[fp8_dtype][2]
    rows, columns = x.shape
    blocks = -(-columns // scale_block)
    padded = np.zeros((rows, blocks * scale_block))
    padded[:, :columns] = x
    padded = padded.reshape(rows, blocks, scale_block)
    amax = np.abs(padded).max(axis=2)
    if form.two_d:
        of_tiles = [amax[row : row + scale_block].max(axis=0) for row in range(0, rows, scale_block)]
        amax = np.repeat(of_tiles, scale_block, axis=0)[:rows]
    mantissa, exponent = np.frexp(np.nan_to_num(amax, posinf=0.0) / fmax)
    scale = np.clip(exponent - (mantissa == 0.5) + 127, 0, 254) * (mantissa > 0)
    scale = np.where(np.isinf(amax), 254, np.where(np.isnan(amax), 255, scale)).astype(np.int64)
    with np.errstate(all="ignore"):
        scaled = np.ldexp(padded, (127 - scale)[:, :, None])
    scaled = np.where(scale[:, :, None] == 255, np.nan, scaled).reshape(rows, -1)[:, :columns]
    data = nearest_codes(scaled, fp8_dtype)
    codes = np.zeros((-(-rows // 128) * 128, -(-columns // 128) * 4), np.uint8)
    repeated = scale.repeat(scale_block // 32, axis=1)[:, : -(-columns // 32)]
    codes[:rows, : repeated.shape[1]] = repeated
    return data, codes


def expected_buffers(x, form: MXFP8Form):
    matrix = x.double().reshape(-1, x.shape[-1]).numpy()
    buffers: list[np.ndarray] = []
    if form.rowwise:
        buffers += expected_rows(matrix, form)
    if form.columnwise:
        data, codes = expected_rows(matrix.T, form)
        if form.scale_block == 32:
            buffers += [data.T, codes.T]
        else:
            buffers += [np.pad(data, ((0, 0), (0, -data.shape[1] % 16))), codes]
    tensors = [torch.from_numpy(np.ascontiguousarray(buffer)) for buffer in buffers]
    tensors[::2] = [data.view(form.dtype) for data in tensors[::2]]
    if len(tensors) > len(form.buffers(x.shape)):  # one buffer of codes for both usages
        assert_same_bits(tensors[:1], [tensors.pop(2)])
    return tensors


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", slow_but(2, [(shape,) for shape in SHAPES[:-1]]))
def test_reference_is_exact(shape, kind):
    for dtype, fp8_dtype, (scale_block, two_d) in itertools.product(DTYPES, FP8_DTYPES, BLOCKS):
        x = make(kind, shape, dtype)
        options = MXFP8Form(fp8_dtype, True, True, scale_block, two_d=two_d)
        assert_same_bits(quantize_mxfp8_reference(x, options), expected_buffers(x, options))


@pytest.mark.slow
@pytest.mark.parametrize("scale_block", SCALE_BLOCKS)
def test_reference_is_exact_at_a_large_size(scale_block):
    x = make("normal", SHAPES[-1], torch.bfloat16)
    options = MXFP8Form(E4M3, True, True, scale_block)
    assert_same_bits(quantize_mxfp8_reference(x, options), expected_buffers(x, options))


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 140),
    columns=st.integers(1, 140),
    exponent=st.integers(-140, 120),
    fp8_dtype=st.sampled_from(FP8_DTYPES),
    dtype=st.sampled_from(DTYPES),
    block=st.sampled_from(BLOCKS),
    usage=st.sampled_from(USAGES),
)
def test_reference_on_any_shape_and_magnitude(rows, columns, exponent, fp8_dtype, dtype, block, usage):
    x = torch.ldexp(make_input("normal", (rows, columns), torch.float32, seed=rows), torch.tensor(exponent)).to(dtype)
    options = MXFP8Form(fp8_dtype, *usage, block[0], two_d=block[1])
    assert_same_bits(quantize_mxfp8_reference(x, options), expected_buffers(x, options))


@pytest.mark.parametrize("fp8_dtype", FP8_DTYPES)
def test_every_bf16_amax_has_the_exact_code(fp8_dtype):
    """Of all bit patterns of bf16, and of fp32 beside the values at which a code changes.

    But for the first of those: there amax * (1 / fmax) is a denormal, which is rounded before it is rounded up.
    """
    patterns = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).reshape(-1, 1)
    options = MXFP8Form(fp8_dtype, True, False, 32)
    assert_same_bits(quantize_mxfp8_reference(patterns, options), expected_buffers(patterns, options))
    change = torch.exp2(torch.arange(-126, 112)) * torch.finfo(fp8_dtype).max
    beside = (change.view(torch.int32)[:, None] + torch.arange(-4, 5)).view(torch.float32).reshape(-1, 1)
    assert_same_bits(quantize_mxfp8_reference(beside, options), expected_buffers(beside, options))


def test_leading_dimensions_are_read_as_rows():
    x = make_input("normal", (2, 3, 5, 32), torch.bfloat16)
    for scale_block in SCALE_BLOCKS:
        options = MXFP8Form(E4M3, True, True, scale_block)
        assert_same_bits(quantize_mxfp8_reference(x, options), quantize_mxfp8_reference(x.reshape(30, 32), options))


def test_a_scale_block_that_does_not_exist_is_an_error():
    with pytest.raises(ValueError, match="must be 32 or 128, got 64"):
        MXFP8Form(E4M3, True, False, 64)


@pytest.mark.parametrize("kind", KINDS)
def test_reference_equals_torchao(kind):
    """Its RCEIL mode, but for two blocks: one of code 0 it does not scale, one with a NaN keeps its other values."""
    mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor", reason="torchao is not installed")
    for dtype, fp8_dtype in itertools.product((torch.bfloat16, torch.float32), FP8_DTYPES):
        x = make(kind, (96, 256), dtype)
        scale, data = mx.to_mx(x, fp8_dtype, 32, mx.ScaleCalculationMode.RCEIL)
        ours, codes = quantize_mxfp8_reference(x, MXFP8Form(fp8_dtype, True, False, 32))
        codes = codes[:96, :8]
        assert torch.equal(codes, scale.view(torch.uint8))
        same = ((codes > 0) & (codes < 255)).repeat_interleave(32, dim=1)
        assert torch.equal(ours.view(torch.uint8)[same], data.view(torch.uint8)[same])


# --- what is done with the buffers --------------------------------------------------------------------------


@pytest.mark.parametrize("scale_block", SCALE_BLOCKS)
@pytest.mark.parametrize("shape", [(1, 32), (303, 300)])
def test_swizzled_scales_are_the_same_buffers(shape, scale_block):
    x = make("normal", shape, torch.bfloat16)
    plain = quantize_mxfp8_reference(x, MXFP8Form(E4M3, True, True, scale_block))
    swizzled = quantize_mxfp8_reference(x, MXFP8Form(E4M3, True, True, scale_block, swizzled=True))
    assert_same_bits([swizzled[0], swizzled[2]], [plain[0], plain[2]])
    turned = scale_block == 32
    assert_same_bits([*map(plain_scales, swizzled[1::2])], [plain[1], plain[3].t() if turned else plain[3]])
    for data, scales, of, columnwise in zip(plain[::2], swizzled[1::2], plain[1::2], (False, turned), strict=True):
        values = [dequantize_mxfp8_reference(data, scale, columnwise, torch.float32) for scale in (scales, of)]
        assert_same_bits(values[:1], values[1:])


@pytest.mark.parametrize("columns, width", [(300, 128), (1280, 256), (4096, 1024), (14336, 1024)])
def test_row_tile_covers_a_row_and_128_rows_exactly(columns, width):
    rows, columns_of_tile, _ = row_tile(columns, packed=True)
    assert columns_of_tile == width and rows * width == 8192 and 128 % rows == 0
    assert -(-columns // 128) * 128 % width == 0  # codes need no mask


@pytest.mark.parametrize("fp8_dtype", FP8_DTYPES)
def test_dequantization_is_exact(fp8_dtype):
    data = torch.arange(256, dtype=torch.uint8).repeat(256, 1).view(fp8_dtype)
    codes = torch.arange(256, dtype=torch.uint8)[:, None].repeat(1, 8)
    exact = torch.ldexp(data.double(), torch.arange(-127, 129)[:, None])
    exact[255] = torch.nan
    for columnwise in (False, True):
        given_ = (data.t().contiguous(), codes.t().contiguous()) if columnwise else (data, codes)
        for dtype in (torch.float32, torch.bfloat16):
            value = dequantize_mxfp8_reference(*given_, columnwise, dtype)
            value = value.t() if columnwise else value
            assert torch.equal(torch.nan_to_num(value), torch.nan_to_num(exact.to(dtype)))
            assert torch.equal(value.isnan(), exact.isnan())


@pytest.mark.parametrize("scale_block", SCALE_BLOCKS)
def test_error_is_at_most_half_a_step(scale_block):
    x = make_input("normal", (130, 200), torch.float32)
    row, row_scale, column, column_scale = quantize_mxfp8_reference(x, MXFP8Form(E4M3, True, True, scale_block))
    columns = dequantize_mxfp8_reference(column, column_scale, scale_block == 32, torch.float32)
    for value in (
        dequantize_mxfp8_reference(row, row_scale, False, torch.float32),
        columns if scale_block == 32 else columns[:, :130].t(),
    ):
        # Below 2^-6 of its scale a value has an absolute step; the scale is less than twice the amax / 448.
        bound = x.abs() / 16 + x.abs().max() * 2 / 448 * 2**-10
        assert ((value - x).abs() <= bound).all()


def operand(shape: tuple[int, int], columnwise: bool, device: str = "cpu", seed: int = 0) -> list[torch.Tensor]:
    """(data, scale_inv) of one usage of a normal tensor of that shape, blocks of 32."""
    x = make_input("normal", shape, torch.bfloat16, device, seed)
    quantize = quantize_mxfp8_reference if device == "cpu" else quantize_mxfp8
    return quantize(x, MXFP8Form(E4M3, not columnwise, columnwise, 32))


FORMS = ((False, False), (False, True), (True, True))
"""(a columnwise, b columnwise) of fprop, dgrad and wgrad."""


@pytest.mark.parametrize("a_columnwise, b_columnwise", FORMS)
@pytest.mark.parametrize("out_dtype", DTYPES)
def test_gemm_reference_is_the_product_of_the_values(out_dtype, a_columnwise, b_columnwise):
    m, n, k = 96, 64, 160
    a = operand((k, m) if a_columnwise else (m, k), a_columnwise, seed=1)
    b = operand((k, n) if b_columnwise else (n, k), b_columnwise, seed=2)
    bias = make_input("normal", (n,), torch.bfloat16, seed=3)
    values = [dequantize_mxfp8_reference(*a, a_columnwise, torch.float32).double()]
    values += [dequantize_mxfp8_reference(*b, b_columnwise, torch.float32).double()]
    exact = (values[0].t() if a_columnwise else values[0]) @ (values[1] if b_columnwise else values[1].t())
    for bias_or_none in (None, bias):
        wanted = exact if bias_or_none is None else exact + bias.double()
        c = gemm_mxfp8_reference(*a, *b, bias_or_none, out_dtype, a_columnwise, b_columnwise)
        assert c.dtype == out_dtype
        tolerance = max(torch.finfo(out_dtype).eps, 1e-5)
        torch.testing.assert_close(c.double(), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("gemm", [gemm_mxfp8, gemm_mxfp8_reference])
def test_gemm_refuses_what_it_cannot_multiply(gemm):
    a, scale = torch.zeros(64, 128, dtype=torch.float8_e5m2), torch.zeros(128, 4, dtype=torch.uint8)
    with pytest.raises(ValueError, match="e5m2 x e5m2"):
        gemm(a, scale, a, scale, None, torch.bfloat16, False, False)
    with pytest.raises(ValueError, match=r"expected a \[M, K\] and b \[K, N\], got \(64, 128\) and \(64, 128\)"):
        gemm(a, scale, a.view(E4M3), scale, None, torch.bfloat16, False, True)
    with pytest.raises(ValueError, match=r"expected bias \[64\], got \(128,\)"):
        gemm(a, scale, a.view(E4M3), scale, torch.zeros(128), torch.bfloat16, False, False)


# --- on the GPU ---------------------------------------------------------------------------------------------


@gpu
@needs_cuda
@pytest.mark.parametrize("scale_block, two_d", BLOCKS)
@pytest.mark.parametrize("shape", [*SHAPES, (640, 1280), (17, 4096), (131, 136), (4096, 30), (1, 1), (33, 1)])
def test_kernel_equals_reference(shape, scale_block, two_d):
    """All kinds of input in one test: as many processes would compile the same kernels at once."""
    for kind, dtype in itertools.product(KINDS, DTYPES):
        x = make(kind, shape, dtype, "cuda")
        for fp8_dtype, usage in itertools.product(FP8_DTYPES, USAGES):
            options = MXFP8Form(fp8_dtype, *usage, scale_block, two_d=two_d)
            expected = quantize_mxfp8_reference(x, options)
            assert_same_bits(quantize_mxfp8(x, options), expected, (kind, dtype, fp8_dtype, usage))


@gpu
@needs_cuda
@pytest.mark.parametrize("scale_block", SCALE_BLOCKS)
def test_every_bfloat16_as_amax_on_the_gpu(scale_block):
    """Two rows share a word of amaxes, and so do two columns."""
    amax = torch.arange(1 << 15, dtype=torch.int16, device="cuda").view(torch.bfloat16)
    for shape in ((1 << 15, 128), (128, 1 << 15)):
        x = torch.zeros(shape, device="cuda", dtype=torch.bfloat16)
        rows = x if shape[1] == 128 else x.t()
        rows[:, 77] = amax
        rows[:, 67] = -amax * 0.4375
        for fp8_dtype in FP8_DTYPES:
            options = MXFP8Form(fp8_dtype, True, True, scale_block)
            assert_same_bits(quantize_mxfp8(x, options), quantize_mxfp8_reference(x, options))


@gpu
@needs_cuda
@pytest.mark.parametrize("scale_block, two_d", BLOCKS)
@pytest.mark.parametrize("shape", [(303, 300), (2000, 2000), (8192, 4096)])
def test_kernel_writes_every_byte(shape, scale_block, two_d):
    for dtype in DTYPES:
        x = make_input("normal", shape, dtype, "cuda")
        options = MXFP8Form(E4M3, True, True, scale_block, two_d=two_d)
        result = run_poisoned(lambda: quantize_mxfp8(x, options))  # noqa: B023
        assert_same_bits(result, quantize_mxfp8_reference(x, options))


@gpu
@needs_cuda
@settings(max_examples=40, deadline=None)
@given(rows=st.integers(0, 300), columns=st.integers(1, 300), block=st.sampled_from(BLOCKS))
def test_kernel_on_any_shape(rows, columns, block):
    x = make_input("normal", (rows, columns), torch.bfloat16, "cuda")
    options = MXFP8Form(E4M3, True, True, block[0], two_d=block[1])
    assert_same_bits(quantize_mxfp8(x, options), quantize_mxfp8_reference(x, options))


@gpu
@needs_cuda
@pytest.mark.parametrize("shape", [(1, 32), (303, 300), (2000, 2000)])
@pytest.mark.parametrize("columnwise", [False, True])
def test_dequantize_kernel_equals_reference(columnwise, shape):
    for kind, fp8_dtype, dtype in itertools.product(KINDS, FP8_DTYPES, DTYPES):
        buffers = quantize_mxfp8(
            make(kind, shape, torch.float32, "cuda"), MXFP8Form(fp8_dtype, not columnwise, columnwise, 32)
        )
        value = dequantize_mxfp8(*buffers, columnwise, dtype)
        expected = dequantize_mxfp8_reference(*buffers, columnwise, dtype)
        assert torch.equal(value.isnan(), expected.isnan())
        assert_same_bits([value.nan_to_num()], [expected.nan_to_num()])


@gpu
@needs_cuda
@pytest.mark.parametrize("a_columnwise, b_columnwise", FORMS)
@pytest.mark.parametrize("m, n, k", [(128, 256, 96), (303, 300, 200), (2048, 1024, 4096)])
def test_gemm_on_the_gpu(m, n, k, a_columnwise, b_columnwise):
    a = operand((k, m) if a_columnwise else (m, k), a_columnwise, "cuda", seed=1)
    b = operand((k, n) if b_columnwise else (n, k), b_columnwise, "cuda", seed=2)
    bias = make_input("normal", (n,), torch.bfloat16, "cuda", seed=3)
    for bias_or_none, out_dtype in itertools.product((None, bias), DTYPES):
        arguments = (*a, *b, bias_or_none, out_dtype, a_columnwise, b_columnwise)
        expected = gemm_mxfp8_reference(*arguments)
        error = (gemm_mxfp8(*arguments).double() - expected.double()).norm() / expected.double().norm()
        assert error < max(torch.finfo(out_dtype).eps / 2, 1e-5)
