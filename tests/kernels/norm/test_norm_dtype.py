"""Norms whose result has another dtype than what they norm, as autocast's have: alone, quantized, and with an addition before them.

Run as a program, this file is the half in Triton's interpreter: TRITON_INTERPRET must be set before Triton is imported.
"""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from helpers.kernels.interpreted import install
from helpers.kernels.interpreter_process import run_in_interpreter
from helpers.kernels.kernel_cases import assert_same_bits, gpu, make_input, needs_cuda, run_poisoned

from te_dynamo.kernels.layouts.tensor import TensorForm
from te_dynamo.kernels.norm import add, kernels, modulate, norm
from te_dynamo.kernels.quantize.current import quantize, quantize_reference
from te_dynamo.kernels.tiles import fp8
from te_dynamo.kernels.tiles import norms as formulas

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
BOTH = TensorForm(torch.float8_e4m3fn, True, True, False, 0.0)
DTYPES = [(FP32, BF16), (FP32, FP16), (BF16, FP32)]
SHAPES = [(19, 64), (303, 300), (33, 4096), (9, 20000)]


def norms(shape, dtype, device="cpu"):
    """(the norm, the norm quantized, the same with an addition before it, what they take behind x) of each kind."""
    x, weight, bias = (
        make_input("normal", s, dtype, device, seed) for seed, s in enumerate((shape, *[shape[-1:]] * 2))
    )
    sample = weight.view(1, 1, -1), bias.view(1, 1, -1)
    yield x, norm.rms_norm, norm.rms_norm_quantize, add.add_rms_norm_quantize, (weight, 1e-5, True, False)
    yield x, norm.layer_norm, norm.layer_norm_quantize, add.add_layer_norm_quantize, (weight, bias, 1e-5)
    yield x[None], modulate.layer_norm_modulate, modulate.layer_norm_modulate_quantize, None, (*sample, 1e-5, True)


def check(shape, x_dtype, dtype, device="cpu", quantize=quantize_reference):
    """The norm rounds once, from fp32; quantized it is the norm of the same dtypes, then quantized, bit for bit."""
    for x, alone, quantized, _, options in norms(shape, x_dtype, device):
        y, *statistics = alone(x, *options, dtype)
        exact, *of_exact = alone(x, *options, FP32)
        one_rounding = {"rtol": torch.finfo(dtype).eps, "atol": 1e-6}
        torch.testing.assert_close([y, *statistics], [exact.to(dtype), *of_exact], **one_rounding)
        for keep in (False, True):
            kept, read = [y] if keep else [], [exact] if keep else []
            assert_same_bits(quantized(x, *options, BOTH, keep, dtype), [*kept, *statistics, *quantize(y, BOTH)])
            in_both = quantized(x, *options, BOTH, keep, FP32, dtype)
            assert_same_bits(in_both, [*read, *of_exact, *quantize(exact.to(dtype), BOTH)])


def check_sum(shape, dtype, device="cpu"):
    """A product in `dtype` added to a residual stream in fp32, whichever comes first."""
    for x, _, quantized, added, options in list(norms(shape, FP32, device))[:2]:
        product = make_input("normal", shape, dtype, device, seed=5)
        expected = [x + product, *quantized(x + product, *options, BOTH, False, dtype)]
        for operands in ((x, product), (product, x)):
            assert_same_bits(added(*operands, *options, BOTH, False, dtype), expected)


REFERENCES = {
    norm.rms_norm: norm.rms_norm_reference,
    norm.layer_norm: norm.layer_norm_reference,
    modulate.layer_norm_modulate: modulate.layer_norm_modulate_reference,
    norm.rms_norm_quantize: norm.rms_norm_quantize_reference,
    norm.layer_norm_quantize: norm.layer_norm_quantize_reference,
    modulate.layer_norm_modulate_quantize: modulate.layer_norm_modulate_quantize_reference,
}


@pytest.mark.parametrize("x_dtype, dtype", DTYPES)
def test_references(x_dtype, dtype):
    for x, alone, quantized, _, options in norms((19, 64), x_dtype):
        y, *statistics = REFERENCES[alone](x, *options, dtype)
        exact = REFERENCES[alone](x, *options, FP32)[0]
        assert_same_bits([y], [exact.to(dtype)])
        in_both = REFERENCES[quantized](x, *options, BOTH, True, FP32, dtype)
        assert_same_bits(in_both, [exact, *statistics, *quantize_reference(y, BOTH)])


@gpu
@needs_cuda
@pytest.mark.parametrize("x_dtype, dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_kernels(shape, x_dtype, dtype):
    check(shape, x_dtype, dtype, "cuda", quantize)
    check_sum(shape, dtype, "cuda")
    for x, alone, quantized, _, options in norms(shape, x_dtype, "cuda"):
        run_poisoned(lambda: alone(x, *options, dtype))  # noqa: B023
        run_poisoned(lambda: quantized(x, *options, BOTH, True, FP32, dtype))  # noqa: B023


# --- in Triton's interpreter --------------------------------------------------------------------------------


@pytest.mark.slow
def test_interpreted_kernels() -> None:
    run_in_interpreter(__file__)


@triton.jit
def product(a, b):
    return a * b


@triton.jit
def to_dtype(x, DTYPE: tl.constexpr):
    return x.to(DTYPE)


def main() -> None:
    install()
    formulas.mul_rn, formulas.rounded = product, to_dtype  # assembly, which the interpreter cannot run
    kernels.rounded = to_dtype
    fp8.multiprocessor_count = kernels.multiprocessor_count = lambda device: 2
    for dtype in (FP16, FP32):  # it rounds to bf16 otherwise than hardware does
        check((19, 64), FP32, dtype)
        check((19, 64), FP16, dtype)  # with a rounding to 16 bits before the weight
        check_sum((19, 64), dtype)
        for x, alone, _, _, options in norms((19, 64), FP32):
            torch.testing.assert_close(alone(x, *options, dtype), REFERENCES[alone](x, *options, dtype))


if __name__ == "__main__":
    main()
