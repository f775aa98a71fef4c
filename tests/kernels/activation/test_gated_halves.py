"""Both gradients of a gated unit as one tensor of one scale: the bits of the two, side by side, quantized.

Run as a program, this file is the half in Triton's interpreter: TRITON_INTERPRET must be set before Triton is imported.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from helpers.kernels.interpreter_process import run_in_interpreter
from helpers.kernels.kernel_cases import (
    DTYPES,
    FP8_DTYPES,
    RAGGED_SHAPES,
    assert_same_bits,
    gpu,
    make_input,
    needs_cuda,
    run_poisoned,
)

from te_dynamo.kernels.activation import gated, gated_in_place
from te_dynamo.kernels.activation import gated_halves as kernels
from te_dynamo.kernels.layouts.tensor import TensorForm
from te_dynamo.kernels.produce import tensor, tensor_kernels
from te_dynamo.kernels.quantize import current as quantize
from te_dynamo.kernels.tiles import activations as activation_functions
from te_dynamo.kernels.tiles import fp8
from te_dynamo.kernels.tiles import row_quarters as quarters

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
OPTIONS = (
    TensorForm(E5M2, True, True, False, 0.0),
    TensorForm(E4M3, True, True, False, 0.0),
    TensorForm(E5M2, False, True, True, 0.0),
    TensorForm(E4M3, True, False, False, 1.0),
)


def halves(h: torch.Tensor, gate_first: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(gate, up)"""
    left, right = h.chunk(2, -1)
    return (left, right) if gate_first else (right, left)


def unfused(
    dy: torch.Tensor, h: torch.Tensor, gate_first: bool, kind: str, options: Any, reference: bool = False
) -> list[Any]:
    """[grad, *its buffers] by the kernels of each step, or by their references."""
    backward = gated.gated_backward_reference if reference else gated.gated_backward
    cast = quantize.quantize_reference if reference else quantize.quantize
    dgate, dup = backward(dy, *halves(h, gate_first), kind)
    grad = torch.cat((dgate, dup) if gate_first else (dup, dgate), -1)
    return [grad, *cast(grad, options)]


@pytest.mark.parametrize("kind", gated.KINDS)
@pytest.mark.parametrize("gate_first", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_reference(dtype: torch.dtype, gate_first: bool, kind: str) -> None:
    dy, h = make_input("normal", (3, 5, 24), dtype), make_input("normal", (3, 5, 48), dtype, seed=1)
    for options in OPTIONS:
        given = (dy, *halves(h, gate_first), kind, options)
        expected = unfused(dy, h, gate_first, kind, options, reference=True)
        assert_same_bits(kernels.gated_backward_quantize_halves_reference(*given, True, gate_first), expected)
        assert_same_bits(kernels.gated_backward_quantize_halves_reference(*given, False, gate_first), expected[1:])


# --- on a GPU -----------------------------------------------------------------------------------------------


@gpu
@needs_cuda
@pytest.mark.parametrize("kind", gated.KINDS)
@pytest.mark.parametrize("gate_first", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [*RAGGED_SHAPES, (303, 136), (4096, 1024)])
def test_kernels_equal_the_steps(shape: tuple[int, ...], dtype: torch.dtype, gate_first: bool, kind: str) -> None:
    dy = make_input("normal", shape, dtype, "cuda", seed=1)
    h = make_input("normal", (*shape[:-1], 2 * shape[-1]), dtype, "cuda")
    for options in OPTIONS:
        given = (dy, *halves(h, gate_first), kind, options)
        expected = unfused(dy, h, gate_first, kind, options)
        fused = run_poisoned(lambda given=given: kernels.gated_backward_quantize_halves(*given, True, gate_first))
        assert_same_bits(fused, expected)
        assert_same_bits(kernels.gated_backward_quantize_halves(*given, False, gate_first), expected[1:])


@gpu
@needs_cuda
@pytest.mark.parametrize("kind", gated.KINDS)
@pytest.mark.parametrize("values", ["zeros", "huge", "inf", "nan"])
def test_kernels_on_special_values(values: str, kind: str) -> None:
    dy, h = (
        make_input(values, (33, 1024), torch.bfloat16, "cuda"),
        make_input("normal", (33, 2048), torch.bfloat16, "cuda"),
    )
    expected = unfused(dy, h, True, kind, OPTIONS[0])
    assert_same_bits(
        kernels.gated_backward_quantize_halves(dy, *halves(h, True), kind, OPTIONS[0], True, True), expected
    )


@gpu
@needs_cuda
@pytest.mark.parametrize("gate_first", [True, False])
@pytest.mark.parametrize("fp8_dtype", FP8_DTYPES)
@pytest.mark.parametrize("kind", gated.KINDS)
@pytest.mark.parametrize("shape", [(1, 128), (17, 256), (3, 5, 1792), (4096, 14336), (9, 32768)])
def test_codes_in_the_memory_of_dy(shape: tuple[int, ...], kind: str, fp8_dtype: torch.dtype, gate_first: bool) -> None:
    dy = make_input("normal", shape, torch.bfloat16, "cuda", seed=1)
    gate, up = halves(make_input("normal", (*shape[:-1], 2 * shape[-1]), torch.bfloat16, "cuda"), gate_first)
    for power_of_two, eps in ((False, 0.0), (True, 1.0)):
        options = TensorForm(fp8_dtype, True, False, power_of_two, eps)
        expected = kernels.gated_backward_quantize_halves(dy, gate, up, kind, options, False, gate_first)
        given = dy.clone()
        actual = gated_in_place.gated_backward_quantize_in_place(given, gate, up, kind, options, gate_first)
        assert_same_bits(actual, expected)
        assert actual[0].data_ptr() == given.data_ptr()
    given = dy, gate.contiguous(), up.contiguous()
    expected = gated.gated_backward(*given, kind)
    assert_same_bits(gated.gated_backward(*(x.clone() for x in given), kind, True, True), expected)


# --- in Triton's interpreter --------------------------------------------------------------------------------


@pytest.mark.slow
def test_interpreted_kernels_equal_the_steps() -> None:
    run_in_interpreter(__file__)


@triton.jit
def approximate(FUNCTION: tl.constexpr, x):
    return tl.exp2(x) if FUNCTION == "ex2" else 1.0 / x


@triton.jit
def product(a, b):
    return a * b


@triton.jit
def to_dtype(x, DTYPE: tl.constexpr):
    return x.to(DTYPE)


@triton.jit
def to_fp32(x):
    return x.to(tl.float32)


@triton.jit
def codes(x, scale, DTYPE: tl.constexpr):
    return (x.to(tl.float32) * scale).to(DTYPE).to(tl.int8, bitcast=True)


@triton.jit
def words(c0, c1, c2, c3):
    return (
        (c0.to(tl.int32) & 255)
        | ((c1.to(tl.int32) & 255) << 8)
        | ((c2.to(tl.int32) & 255) << 16)
        | ((c3.to(tl.int32) & 255) << 24)
    )


def without_assembly() -> None:
    """What the interpreter cannot run, in Triton's own functions, the same for all kernels."""
    activation_functions._approximate, activation_functions.mul_rn = approximate, product
    tensor_kernels.rounded = gated_in_place.rounded = to_dtype
    quarters.widened, quarters.column_words, tensor_kernels.quarter_codes = to_fp32, words, codes
    fp8.multiprocessor_count = gated_in_place.multiprocessor_count = lambda device: 1
    tensor.PARTIALS = quantize.PARTIALS = gated_in_place.PARTIALS = 4


def main() -> None:
    without_assembly()
    for kind in gated.KINDS:
        every = kind == "silu"  # the others differ in a formula alone
        forward(kind, OPTIONS if every else OPTIONS[:1])
        forms = itertools.product(((5, 128), (35, 136)), (True, False), OPTIONS[::2])
        for (rows, columns), gate_first, options in itertools.islice(forms, None if every else 1):
            dy = make_input("normal", (rows, columns), torch.float32, seed=1)
            h = make_input("normal", (rows, 2 * columns), torch.float32)
            h[:, columns:] *= 8  # halves of different amaxes
            given = (dy, *halves(h, gate_first), kind, options)
            fused = kernels.gated_backward_quantize_halves(*given, True, gate_first, tile=(64, 64, 4))
            assert_same_bits(fused, unfused(dy, h, gate_first, kind, options))
        backward(kind)
        in_place(kind)


def forward(kind: str, options_of_quantize: Sequence[Any]) -> None:
    """The reference but for the last bits of exp, and quantized the bits of the two steps."""
    gate, up = (make_input("normal", (35, 136), torch.float32, seed=seed) for seed in (1, 2))
    y = gated.gated(gate, up, kind)
    torch.testing.assert_close(y, gated.gated_reference(gate, up, kind), rtol=1e-5, atol=4e-6)
    for options in options_of_quantize:
        fused = gated.gated_quantize(gate, up, kind, options, True, tile=(64, 64, 4))
        assert_same_bits(fused, [y, *quantize.quantize(y, options)])


def backward(kind: str) -> None:
    dy, gate, up = (make_input("normal", (35, 136), torch.float32, seed=seed) for seed in range(3))
    grads = gated.gated_backward(dy, gate, up, kind)
    expected = gated.gated_backward_reference(dy, gate, up, kind)
    torch.testing.assert_close(grads, expected, rtol=1e-5, atol=1e-5)
    each = [buffer for grad in grads for buffer in quantize.quantize(grad, OPTIONS[0])]
    fused = gated.gated_backward_quantize(dy, gate, up, kind, OPTIONS[0], True, tile=(64, 64, 4))
    assert_same_bits(fused, [*grads, *each])


def in_place(kind: str) -> None:
    dy = make_input("normal", (5, 128), torch.bfloat16, seed=1)
    for gate_first in (True, False):
        gate, up = halves(make_input("normal", (5, 256), torch.bfloat16), gate_first)
        given = (gate, up, kind, TensorForm(E5M2, True, False))
        expected = kernels.gated_backward_quantize_halves(dy, *given, False, gate_first)
        actual = gated_in_place.gated_backward_quantize_in_place(dy.clone(), *given, gate_first)
        assert_same_bits(actual, expected)
    up = up.contiguous()
    expected = gated.gated_backward(dy, gate, up, kind)
    actual = gated.gated_backward(dy, gate, up, kind, over_dy=True, over_up=True)
    assert_same_bits(actual, expected)
    assert [x.data_ptr() for x in actual] == [dy.data_ptr(), up.data_ptr()]


def test_halves_of_rows_that_data_counts_are_read_where_they_lie() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    shape_env = ShapeEnv()
    with FakeTensorMode(shape_env=shape_env), shape_env.ignore_fresh_unbacked_symbols():
        rows = shape_env.create_unbacked_symint()
        halves = torch.empty(rows, 512).chunk(2, -1)
        assert all(gated.in_rows(half) is half and gated._row_stride(half) == 512 for half in halves)
    assert not shape_env.guards


if __name__ == "__main__":
    main()
