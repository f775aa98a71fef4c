"""What a tile computes and quantizes at once, in Triton's interpreter: the unfused kernel's result in the buffers of its reference, bit for bit.

Run as a program, this file is the interpreted part: TRITON_INTERPRET must be set before Triton is imported.
"""

from __future__ import annotations

import itertools
import sys
from typing import Any

import numpy as np
import pytest
import torch
from helpers.kernels.interpreter_process import run_in_interpreter
from helpers.kernels.kernel_cases import assert_same_bits, make_input
from hypothesis import given, settings
from hypothesis import strategies as st

from te_dynamo.kernels.activation import activation, gated, gated_halves
from te_dynamo.kernels.layouts.block import BlockForm
from te_dynamo.kernels.layouts.form import Form
from te_dynamo.kernels.layouts.mxfp8 import MXFP8Form
from te_dynamo.kernels.layouts.row import RowForm
from te_dynamo.kernels.norm import add, modulate, norm
from te_dynamo.kernels.norm import kernels as norm_kernels
from te_dynamo.kernels.produce import rows
from te_dynamo.kernels.produce.stack import quantize_stacked_blocks, quantize_stacked_blocks_reference
from te_dynamo.kernels.quantize.formats import reference_of
from te_dynamo.kernels.tiles import fp8

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
USAGES = ((True, True), (True, False), (False, True))
FORMS = (
    lambda usage: BlockForm(E4M3, *usage, two_d=False),
    lambda usage: BlockForm(E5M2, *usage, two_d=True),
    lambda usage: BlockForm(E4M3, *usage, two_d=False, power_of_two=False, eps=1e-3),
    lambda usage: MXFP8Form(E4M3, *usage, scale_block=32),
    lambda usage: MXFP8Form(E4M3, *usage, scale_block=32, swizzled=True),
    lambda usage: MXFP8Form(E5M2, *usage, scale_block=128),
    lambda usage: MXFP8Form(E4M3, *usage, scale_block=32, two_d=True),
    lambda usage: MXFP8Form(E4M3, *usage, scale_block=128, two_d=True),
    lambda usage: RowForm(E4M3, *usage),
    lambda usage: RowForm(E5M2, *usage, power_of_two=True, eps=1e-3),
)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


Pair = tuple[list[torch.Tensor], list[torch.Tensor]]
"""What is fused, and its parts: y by the unfused kernel, buffers by the reference."""


def of_activation(make: Any, form: Form, keep: bool, kind: str = "silu") -> Pair:
    y = activation.activation(x := make(0), kind)
    return activation.activation_quantize(x, kind, form, keep), [y] * keep + reference_of(y, form)


def of_activation_backward(make: Any, form: Form, keep: bool, kind: str = "silu") -> Pair:
    dy, x = make(1), make(0)
    dx = activation.activation_backward(dy, x, kind)
    fused = activation.activation_backward_quantize(dy, x, kind, form, keep, bias_grad=keep)
    if keep:
        sums = fused.pop(1)
        exact, most = dx.double().sum(0), dx.double().abs().sum(0)
        assert ((sums - exact).abs() <= 1e-5 * most)[exact.isfinite()].all()
    return fused, [dx] * keep + reference_of(dx, form)


def of_gated(make: Any, form: Form, keep: bool, kind: str = "silu") -> Pair:
    gate, up = torch.cat([make(0), make(1)], -1).chunk(2, -1)
    y = gated.gated(gate, up, kind)
    return gated.gated_quantize(gate, up, kind, form, keep), [y] * keep + reference_of(y, form)


def of_gradients(make: Any, form: Form, keep: bool, kind: str = "silu") -> Pair:
    dy, gate, up = make(1), make(0), make(2)
    grads = gated.gated_backward(dy, gate, up, kind)
    parts = [*grads] * keep + [buffer for grad in grads for buffer in reference_of(grad, form)]
    return gated.gated_backward_quantize(dy, gate, up, kind, form, keep), parts


def of_halves(make: Any, form: Form, keep: bool, kind: str = "silu") -> Pair:
    dy, (gate, up) = make(1), torch.cat([make(0), make(2)], -1).chunk(2, -1)
    dgate, dup = gated.gated_backward(dy, gate, up, kind)
    grad = torch.cat([dgate, dup] if keep else [dup, dgate], -1)
    fused = gated_halves.gated_backward_quantize_halves(dy, gate, up, kind, form, keep, gate_first=keep)
    return fused, [grad] * keep + reference_of(grad, form)


def of_rms_norm(make: Any, form: Form, keep: bool, how: tuple[bool, bool, bool] = (True, False, False)) -> Pair:
    x, (weighted, *modes) = make(0), how
    w = make(2)[0].float() if modes[0] else make(2)[0] if weighted else None
    y, rstd = norm.rms_norm(x, w, 1e-5, *modes)
    return norm.rms_norm_quantize(x, w, 1e-5, *modes, form, keep), [y] * keep + [rstd, *reference_of(y, form)]


def of_layer_norm(make: Any, form: Form, keep: bool, how: tuple[bool, bool] = (True, True)) -> Pair:
    x, w, b = make(0), *(make(number)[0] if has else None for number, has in zip((2, 3), how, strict=True))
    y, *statistics = norm.layer_norm(x, w, b, 1e-5)
    return norm.layer_norm_quantize(x, w, b, 1e-5, form, keep), [y] * keep + [*statistics, *reference_of(y, form)]


def of_rounded_norm(make: Any, form: Form, keep: bool) -> Pair:
    """Quantized in bf16, and kept in fp32."""
    x, w = make(0).float(), make(2)[0]
    y, rstd = norm.rms_norm(x, w, 1e-5, False, False)
    fused = norm.rms_norm_quantize(x, w, 1e-5, False, False, form, keep, None, BF16)
    return fused, [y] * keep + [rstd, *reference_of(y.to(BF16), form)]


def of_added_norm(make: Any, form: Form, keep: bool) -> Pair:
    x, residual, w = make(0), make(1), make(2)[0]
    y, rstd = norm.rms_norm(h := x + residual, w, 1e-5, False, False)
    fused = add.add_rms_norm_quantize(x, residual, w, 1e-5, False, False, form, keep)
    return fused, [h] + [y] * keep + [rstd, *reference_of(y, form)]


def of_modulated_norm(make: Any, form: Form, keep: bool) -> Pair:
    x = torch.stack([make(0), make(1)])
    w, b = (make(number)[:2, None] for number in (2, 3))
    y, *statistics = modulate.layer_norm_modulate(x, w, b, 1e-5, True)
    fused = modulate.layer_norm_modulate_quantize(x, w, b, 1e-5, True, form, keep)
    return fused, [y] * keep + [*statistics, *reference_of(y, form)]


PRODUCERS = (
    *(of_activation, of_activation_backward, of_gated, of_gradients, of_halves),
    *(of_rms_norm, of_layer_norm, of_rounded_norm, of_added_norm, of_modulated_norm),
)


def check(
    producer: Any, kind: str, shape: tuple[int, int], dtype: torch.dtype, form: Form, keep: bool, *how: Any
) -> None:
    """Of an input of a kind, and normal ones beside it."""

    def make(number: int) -> torch.Tensor:
        return make_input("normal" if number else kind, shape, dtype, seed=number)

    assert_same_bits(*producer(make, form, keep, *how), (producer.__name__, kind, shape, dtype, form, keep, how))


def main(part: str) -> None:
    from helpers.kernels import interpreted

    interpreted.install()
    np.seterr(all="ignore")
    fp8.multiprocessor_count = norm_kernels.multiprocessor_count = lambda device: 1
    activation.program_count = gated.program_count = lambda *size: 1
    rows.multiprocessor_count = lambda device: 1
    PARTS[part]()


def forms() -> None:
    shapes, dtypes = ((5, 120), (3, 50), (33, 64), (2, 128)), (BF16, FP16, BF16, FP32, BF16)
    cases = itertools.product(FORMS, USAGES, PRODUCERS)
    for number, (form_of, usage, producer) in enumerate(cases):
        shape, dtype = shapes[number % 4], dtypes[number // 2 % 5]
        check(producer, "normal", shape, dtype, form_of(usage), number % 3 == 0)


def values() -> None:
    producers = of_activation_backward, of_gated, of_gradients, of_rms_norm, of_layer_norm
    kinds = "zeros", "constant", "huge", "denormals", "inf", "nan"
    for kind, producer, form_of in itertools.product(kinds, producers, FORMS[::3]):
        check(producer, kind, (6, 136), BF16, form_of((True, True)), False)
    # Those of rows alone are made by another kernel.
    for kind, producer, form_of in itertools.product(kinds, producers[3:], FORMS[:3:2]):
        check(producer, kind, (6, 136), BF16, form_of((True, False)), False)


def options() -> None:
    """Whole tiles, of which nothing is masked; every kind; every form of a norm."""
    for producer, form_of in itertools.product(PRODUCERS, FORMS[::3]):
        check(producer, "normal", (128, 128), BF16, form_of((True, True)), True)
    form = FORMS[0]((True, True))
    for kind in gated.KINDS:
        check(of_gradients, "normal", (3, 24), BF16, form, False, kind)
    for kind in activation.KINDS:
        check(of_activation, "normal", (3, 24), BF16, form, False, kind)
        check(of_activation_backward, "normal", (3, 24), BF16, form, True, kind)
    for how in itertools.product((True, False), repeat=3):
        check(of_rms_norm, "normal", (3, 24), BF16, form, False, how)
    for how in itertools.product((True, False), repeat=2):
        check(of_layer_norm, "normal", (3, 24), BF16, form, False, how)


@given(
    st.integers(2, 140),
    st.integers(1, 160),
    st.sampled_from(PRODUCERS),
    st.sampled_from(FORMS),
    st.sampled_from(USAGES),
    st.booleans(),
)
@settings(max_examples=30, deadline=None, derandomize=True)
def any_shape(rows: int, columns: int, producer: Any, form_of: Any, usage: tuple[bool, bool], keep: bool) -> None:
    check(producer, "normal", (rows, columns), BF16, form_of(usage), keep)


def stacks() -> None:
    """Tensors in one stack, by rows and by columns, are their concatenation, also where values are no numbers and the other side is odd."""
    kinds, dtypes = ("normal", "zeros", "huge", "denormals", "inf", "nan"), (BF16, FP32, FP16)
    cases = itertools.product(FORMS[:8], USAGES, (False, True))
    for number, (form_of, usage, by_columns) in enumerate(cases):
        other, sides = (40, 136, 7)[number // 2 % 3], ((128, 256), (256, 128, 128))[number % 5 // 3]
        kind, dtype, form = kinds[number % 6], dtypes[number // 3 % 3], form_of(usage)
        shapes = [(other, side) if by_columns else (side, other) for side in sides]
        xs = [make_input("normal" if i == 1 else kind, shape, dtype, seed=i) for i, shape in enumerate(shapes)]
        expected = quantize_stacked_blocks_reference(xs, form, by_columns)
        assert_same_bits(expected, reference_of(torch.cat(xs, int(by_columns)), form), ("reference", number))
        assert_same_bits(
            quantize_stacked_blocks(xs, form, by_columns), expected, (form, by_columns, shapes, kind, dtype)
        )


PARTS = {function.__name__: function for function in (forms, values, options, any_shape, stacks)}


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_producers_equal_their_parts_in_the_interpreter(part: str) -> None:
    run_in_interpreter(__file__, part)


if __name__ == "__main__":
    main(*sys.argv[1:])
