"""dy quantized and its column sums in one function."""

from __future__ import annotations

import pytest
import torch
from helpers.kernels.compiled_quantize import assert_no_spills, compile_kernel
from helpers.kernels.kernel_cases import (
    DTYPES,
    INPUT_KINDS,
    RAGGED_SHAPES,
    assert_same_bits,
    gpu,
    make_input,
    needs_cuda,
    run_poisoned,
)

from te_dynamo.kernels.layouts.tensor import TensorForm
from te_dynamo.kernels.quantize import current as kernels
from te_dynamo.kernels.quantize.current import PARTIALS, quantize, quantize_reference
from te_dynamo.kernels.quantize.current_kernels import quantize_amax_kernel

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
OPTIONS = TensorForm(E5M2, True, True, False, 0.0)


def test_reference_is_the_sum_then_quantize():
    dy = make_input("normal", (2, 9, 64), torch.bfloat16)
    dbias, *buffers = kernels.quantize_bias_grad_reference(dy, OPTIONS)
    assert dbias.dtype == torch.float32 and dbias.shape == (64,)
    torch.testing.assert_close(dbias.double(), dy.double().sum((0, 1)), rtol=1e-6, atol=1e-5)
    assert_same_bits(buffers, quantize_reference(dy, OPTIONS))


@pytest.mark.parametrize("columns", [1, 32, 300, 4096, 5120, 14336, 131072, 131073, 1 << 20])
def test_stripes_cover_all_columns_with_the_programs_there_are(columns):
    block_m, block_k, parts = kernels.stripes(columns)
    stripes = -(-columns // block_k)
    assert parts >= 1 and stripes * parts <= PARTIALS
    assert 2 * stripes * parts > PARTIALS or block_k > 256  # more than half of the programs have work
    assert block_m * block_k <= 4096


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("columns", [64, 4096])
def test_kernel_has_wide_loads_and_no_spills(columns, dtype, tmp_path):
    block_m, block_k, parts = kernels.stripes(columns)
    constants = {"GROUP": 0, "PARTS": parts, "BLOCK_M": block_m, "BLOCK_K": block_k}
    compiled = compile_kernel(quantize_amax_kernel, constants, 8, dtype)
    loads = [line for line in compiled.asm["ptx"].splitlines() if "ld.global" in line]
    assert loads and all(".v4" in line for line in loads)
    assert_no_spills(compiled, tmp_path)


@gpu
@needs_cuda
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [*RAGGED_SHAPES, (1000, 5120), (8192, 64), (9, 140000)])
@pytest.mark.parametrize("kind", INPUT_KINDS)
def test_kernel_quantizes_as_quantize_and_sums_exactly_to_rounding(shape, dtype, kind):
    dy = make_input(kind, shape, dtype, "cuda")
    for options in (OPTIONS, TensorForm(E4M3, False, True, True, 0.0), TensorForm(E4M3, True, False, False, 1.0)):
        dbias, *buffers = kernels.quantize_bias_grad(dy, options)
        assert_same_bits(buffers, quantize(dy, options))
    rows = dy.reshape(-1, shape[-1]).double()
    assert dbias.shape == shape[-1:] and dbias.dtype == torch.float32
    finite = rows.isfinite().all(0) & (rows.abs().sum(0) < torch.finfo(torch.float32).max)
    error = (dbias.double() - rows.sum(0))[finite].abs()
    assert (error <= 1e-6 * rows.abs().sum(0)[finite] + torch.finfo(torch.float32).tiny).all()
    assert torch.equal(dbias[~rows.isfinite().all(0)].isfinite(), rows.sum(0)[~rows.isfinite().all(0)].isfinite())


@gpu
@needs_cuda
@pytest.mark.parametrize("shape", [(303, 300), (2048, 4096), (5, 64)])
def test_kernel_writes_every_element_and_gives_the_same_sums_each_time(shape):
    dy = make_input("normal", shape, torch.bfloat16, "cuda")
    run_poisoned(lambda: kernels.quantize_bias_grad(dy, OPTIONS))
