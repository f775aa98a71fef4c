"""A LayerNorm with a weight and a bias for each sample, alone and quantized.

Run as a program, this file is the half in Triton's interpreter: TRITON_INTERPRET must be set before Triton is imported.
"""

from __future__ import annotations

import sys

import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from helpers.kernels.compiled_cases import SPILLS_UNDER_TRITON_3_9
from helpers.kernels.compiled_quantize import NOT_BY_ROWS, assert_no_spills, compile_kernel
from helpers.kernels.interpreted import install
from helpers.kernels.interpreter_process import run_in_interpreter
from helpers.kernels.kernel_cases import (
    DTYPES,
    assert_same_bits,
    assert_within_rounding,
    gpu,
    make_input,
    needs_cuda,
    run_poisoned,
)

from te_dynamo.kernels.layouts.tensor import TensorForm
from te_dynamo.kernels.norm import kernels, modulate
from te_dynamo.kernels.norm import norm as norms
from te_dynamo.kernels.quantize.current import quantize, quantize_reference
from te_dynamo.kernels.tiles import fp8
from te_dynamo.kernels.tiles import norms as formulas

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BOTH = TensorForm(E4M3, True, True, False, 0.0)
OPTIONS = (BOTH, TensorForm(E5M2, False, True, True, 0.0), TensorForm(E4M3, True, False, False, 1.0))
SHAPES = [(2, 19, 64), (3, 100, 300), (1, 256, 1152), (5, 2, 7, 40), (4, 33, 9000)]


def operands(shape, dtype, device="cpu"):
    """x, and a weight and a bias that are parts of wider tensors, as adaLN's are."""
    x = make_input("normal", shape, dtype, device)
    wider = (make_input("normal", (shape[0], width * shape[-1]), dtype, device, seed=width) for width in (3, 2))
    weight, bias = (t[:, -shape[-1] :].view(shape[0], *[1] * (len(shape) - 2), shape[-1]) for t in wider)
    return x, weight, bias


def exact(x, weight, bias, zero_centered):
    return F.layer_norm(x.double(), x.shape[-1:], eps=1e-5) * (weight.double() + zero_centered) + bias.double()


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_reference(dtype, zero_centered):
    args = operands((2, 9, 64), dtype)
    y, mean, rstd = modulate.layer_norm_modulate_reference(*args, 1e-5, zero_centered)
    assert_within_rounding(y, exact(*args, zero_centered), atol=1e-5)
    assert_same_bits([mean, rstd], norms.layer_norm_reference(args[0], None, None, 1e-5)[1:])
    actual = modulate.layer_norm_modulate_quantize_reference(*args, 1e-5, zero_centered, BOTH, True)
    assert_same_bits(actual, [y, mean, rstd, *quantize_reference(y, BOTH)])


@pytest.mark.one_fast_case
@pytest.mark.parametrize(
    "dtype, to",
    [("bf16", "bf16"), *(pytest.param("fp32", to, marks=SPILLS_UNDER_TRITON_3_9) for to in ("fp32", "bf16"))],
)
def test_nothing_spills(dtype, to, tmp_path):
    norm = {"LAYER": True, "HAS_WEIGHT": True, "HAS_BIAS": True, "CAST_BEFORE_WEIGHT": False, "MODULATED": True}
    norm |= {"ZERO_CENTERED": True, "PARTIALS": 1024, "ROUNDED_TO": to}
    block, warps = kernels.row_block(4096, 4 if dtype == "fp32" else 2, True)
    flags = {
        **norm,
        **NOT_BY_ROWS,
        "EPS_NORM": 1e-5,
        "ADDS": False,
        "QUANTIZE": True,
        "STORES": dtype != to,
        "ONE_BLOCK": True,
        "BLOCK": block,
    }
    assert_no_spills(compile_kernel(kernels.norm_rows_kernel, flags, warps, dtype, dtype, y=to), tmp_path)
    block_m, block_k, warps = kernels.SMALL_CAST_TILE
    flags = {**norm, "KEEP_OUTPUT": False, "FMAX": 448.0, "EPS": 0.0, "POWER_OF_TWO": False}
    flags |= {"ROWWISE": True, "COLUMNWISE": True, "BLOCK_M": block_m, "BLOCK_K": block_k}
    assert_no_spills(compile_kernel(kernels.norm_cast_kernel, flags, warps, dtype, dtype), tmp_path)


@gpu
@needs_cuda
@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_fused_equals_the_norm_then_quantize(shape, dtype, zero_centered):
    args = operands(shape, dtype, "cuda")
    y, mean, rstd = modulate.layer_norm_modulate(*args, 1e-5, zero_centered)
    assert_within_rounding(y, exact(*args, zero_centered), atol=4e-5)
    for options in OPTIONS:
        fused = modulate.layer_norm_modulate_quantize(*args, 1e-5, zero_centered, options, True)
        assert_same_bits(fused, [y, mean, rstd, *quantize(y, options)])
        assert_same_bits(modulate.layer_norm_modulate_quantize(*args, 1e-5, zero_centered, options, False), fused[1:])


@gpu
@needs_cuda
@pytest.mark.parametrize("shape", SHAPES)
def test_kernels_write_every_element(shape):
    args = operands(shape, torch.bfloat16, "cuda")
    run_poisoned(lambda: modulate.layer_norm_modulate(*args, 1e-5, True))
    run_poisoned(lambda: modulate.layer_norm_modulate_quantize(*args, 1e-5, True, BOTH, True))


# --- in Triton's interpreter --------------------------------------------------------------------------------


@pytest.mark.parametrize("shapes", ["small", pytest.param("usual", marks=pytest.mark.slow)])
def test_interpreted_kernels_equal_the_references(shapes: str) -> None:
    run_in_interpreter(__file__, shapes)


@triton.jit
def product(a, b):
    return a * b


@triton.jit
def to_dtype(x, DTYPE: tl.constexpr):
    return x.to(DTYPE)


def main(shapes: str) -> None:
    install()
    formulas.mul_rn, formulas.rounded = product, to_dtype  # assembly, which the interpreter cannot run
    fp8.multiprocessor_count = kernels.multiprocessor_count = lambda device: 2
    if shapes == "small":  # rows in pieces, the last of them not whole
        kernels.MAX_ROW_BYTES = kernels.PIECE = 32
    for shape in ((2, 3, 72),) if shapes == "small" else ((2, 19, 64), (3, 40, 72), (5, 2, 7, 40)):
        for zero_centered in (True,) if shapes == "small" else (False, True):
            args = operands(shape, torch.float32)
            y, mean, rstd = modulate.layer_norm_modulate(*args, 1e-5, zero_centered)
            expected = modulate.layer_norm_modulate_reference(*args, 1e-5, zero_centered)
            torch.testing.assert_close((y, mean, rstd), expected)
            actual = modulate.layer_norm_modulate_quantize(*args, 1e-5, zero_centered, BOTH, True)
            assert_same_bits(actual, [y, mean, rstd, *quantize_reference(y, BOTH)])


if __name__ == "__main__":
    main(sys.argv[1])
