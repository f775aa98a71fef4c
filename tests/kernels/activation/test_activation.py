"""Activations, gated units, their backward, and all of them fused with quantization."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from helpers.kernels.kernel_cases import (
    DTYPES,
    RAGGED_SHAPES,
    assert_same_bits,
    assert_within_rounding,
    gpu,
    make_input,
    needs_cuda,
    run_poisoned,
)

from te_dynamo.kernels.activation import activation as act
from te_dynamo.kernels.activation import gated as glu
from te_dynamo.kernels.layouts.tensor import TensorForm
from te_dynamo.kernels.quantize.current import quantize, quantize_reference

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
OPTIONS = (
    TensorForm(E4M3, True, True, False, 0.0),
    TensorForm(E5M2, False, True, True, 0.0),
    TensorForm(E4M3, True, False, False, 1.0),
)


def exact(x: torch.Tensor, kind: str) -> torch.Tensor:
    """The activation in float64, in forms that do not cancel."""
    if kind == "identity":
        return x
    if kind == "sigmoid":
        return torch.sigmoid(x)
    if kind == "relu":
        return torch.relu(x)  # its derivative at 0 is 0, that of clamp 1
    if kind == "relu2":
        return torch.relu(x).square()
    if kind == "silu":
        return x * torch.sigmoid(x)
    if kind == "quick_gelu":
        return x * torch.sigmoid(1.702 * x)
    if kind == "gelu_tanh":
        return x * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))
    return x * 0.5 * torch.erfc(-x / math.sqrt(2))


def exact_backward(x: torch.Tensor, kind: str) -> torch.Tensor:
    """f'(x) in float64 by autograd."""
    x = x.detach().requires_grad_()
    return torch.autograd.grad(exact(x, kind).sum(), x)[0]


def all_bfloat16(largest: float, device: str = "cpu") -> torch.Tensor:
    """Every bfloat16 of magnitude up to `largest`."""
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    return x[x.abs() <= largest].reshape(1, -1).to(device)


# --- reference ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", act.KINDS)
def test_reference_is_exact_to_rounding(kind, dtype):
    x = (3 * make_input("normal", (8, 500), torch.float32)).to(dtype)
    dy = make_input("normal", x.shape, dtype, seed=1)
    assert_within_rounding(act.activation_reference(x, kind), exact(x.double(), kind), atol=1e-6)
    assert_within_rounding(
        act.activation_backward_reference(dy, x, kind),
        dy.double() * exact_backward(x.double(), kind),
        atol=4e-6,
    )


@pytest.mark.parametrize("kind", act.KINDS)
def test_backward_reference_is_autograd(kind):
    functional = {
        "relu": F.relu,
        "relu2": lambda x: F.relu(x).square(),
        "silu": F.silu,
        "gelu": F.gelu,
        "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
        "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    }[kind]
    x = make_input("normal", (16, 40), torch.float32).requires_grad_()
    dy = make_input("normal", (16, 40), torch.float32, seed=1)
    expected = torch.autograd.grad(functional(x), x, dy)[0]
    torch.testing.assert_close(act.activation_backward_reference(dy, x.detach(), kind), expected, rtol=0, atol=0)


@pytest.mark.parametrize("kind", glu.KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_reference(dtype, kind):
    gate, up, dy = (make_input("normal", (3, 5, 64), dtype, seed=s) for s in range(3))
    exact_inputs = [t.double().requires_grad_() for t in (gate, up)]
    y = exact(exact_inputs[0], kind) * exact_inputs[1]
    assert_within_rounding(glu.gated_reference(gate, up, kind), y.detach(), atol=1e-6)
    grads = torch.autograd.grad(y, exact_inputs, dy.double())
    for actual, expected in zip(glu.gated_backward_reference(dy, gate, up, kind), grads, strict=True):
        assert_within_rounding(actual, expected, atol=4e-6)


def test_fused_references_are_the_function_then_quantize():
    x, dy, up = (make_input("normal", (2, 9, 64), torch.bfloat16, seed=s) for s in range(3))
    options = OPTIONS[0]
    y = act.activation_reference(x, "gelu")
    assert_same_bits(act.activation_quantize_reference(x, "gelu", options, True), [y, *quantize_reference(y, options)])
    dx = act.activation_backward_reference(dy, x, "silu")
    dbias = dx.float().sum((0, 1))
    actual = act.activation_backward_quantize_reference(dy, x, "silu", options, False, True)
    torch.testing.assert_close(actual.pop(0), dbias)
    assert_same_bits(actual, quantize_reference(dx, options))
    y = glu.gated_reference(x, up, "gelu")
    assert_same_bits(glu.gated_quantize_reference(x, up, "gelu", options, False), quantize_reference(y, options))
    dgate, dup = glu.gated_backward_reference(dy, x, up, "gelu")
    assert_same_bits(
        glu.gated_backward_quantize_reference(dy, x, up, "gelu", options, True),
        [dgate, dup, *quantize_reference(dgate, options), *quantize_reference(dup, options)],
    )


def test_unknown_kind_is_an_error():
    with pytest.raises(ValueError, match="gelu_tanh"):
        act.activation_reference(torch.ones(2, 2), "gelu_new")
    with pytest.raises(ValueError, match="expected one of"):
        act.activation_reference(torch.ones(2, 2), "sigmoid")  # which is not zero at zero, behind the end of rows
    with pytest.raises(ValueError, match=r"expected a kind of .*identity, got 'tanh'"):
        glu.gated_reference(torch.ones(2, 2), torch.ones(2, 2), "tanh")


def test_row_stride_of_views():
    both = torch.empty(4, 6, 64)
    gate, up = both.chunk(2, -1)
    assert glu._row_stride(gate) == glu._row_stride(up) == 64
    assert glu._row_stride(both) == 64
    assert glu._row_stride(both[:1, ::2, :8]) == 128
    for view in (gate, both[:1, ::2, :8]):
        assert glu.in_rows(view) is view
    for wrong in (both.transpose(0, 1), both[..., ::2], both[:, :3]):
        assert glu.in_rows(wrong).is_contiguous()


# --- kernels ------------------------------------------------------------------------------------------------


@gpu
@needs_cuda
@pytest.mark.parametrize("kind", act.KINDS)
def test_kernels_are_exact_to_rounding_for_every_bfloat16(kind):
    x = all_bfloat16(1e19 if kind == "relu2" else torch.finfo(torch.bfloat16).max, "cuda")
    assert_within_rounding(act.activation(x, kind), exact(x.double(), kind).nan_to_num(0.0))
    x = all_bfloat16(1e15, "cuda")  # the float64 derivative overflows past this, ours must not
    actual = act.activation_backward(torch.ones_like(x), x, kind)
    assert_within_rounding(actual, exact_backward(x.double(), kind), atol=1e-6)
    large = torch.tensor([[3e38, -3e38]], device="cuda", dtype=torch.bfloat16)
    slope = math.inf if kind == "relu2" else 1.0  # 2 x is beyond fp32 there
    assert act.activation_backward(torch.ones_like(large), large, kind).tolist() == [[slope, 0.0]]


@gpu
@needs_cuda
@pytest.mark.parametrize("kind", act.KINDS)
def test_kernels_of_nan_and_infinity(kind):
    x = torch.tensor([[math.nan, math.inf, 1.0, 2.0]], device="cuda")
    y = act.activation(x, kind)
    assert y[0, 0].isnan() and y[0, 1] == math.inf and y[0, 2:].isfinite().all()


@gpu
@needs_cuda
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", RAGGED_SHAPES)
@pytest.mark.parametrize("kind", act.KINDS)
def test_fused_activation_equals_activation_then_quantize(kind, shape, dtype):
    x, dy = (make_input("normal", shape, dtype, "cuda", seed=s) for s in range(2))
    y, dx = act.activation(x, kind), act.activation_backward(dy, x, kind)
    assert_within_rounding(y, exact(x.double(), kind), atol=1e-6)
    assert_within_rounding(dx, dy.double() * exact_backward(x.double(), kind), atol=4e-6)
    for options in OPTIONS:
        fused = act.activation_quantize(x, kind, options, True)
        assert_same_bits(fused, [y, *quantize(y, options)])
        assert_same_bits(act.activation_quantize(x, kind, options, False), fused[1:])
        fused = act.activation_backward_quantize(dy, x, kind, options, True, True)
        dbias = fused.pop(1)
        assert_same_bits(fused, [dx, *quantize(dx, options)])
        expected = dx.double().reshape(-1, shape[-1])
        assert ((dbias - expected.sum(0)).abs() <= 1e-5 * expected.abs().sum(0) + 1e-30).all()
        assert_same_bits(act.activation_backward_quantize(dy, x, kind, options, False, False), fused[1:])


@gpu
@needs_cuda
@pytest.mark.parametrize("kind", glu.KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", RAGGED_SHAPES)
@pytest.mark.parametrize("strided", [False, True])
def test_fused_gated_equals_gated_then_quantize(shape, dtype, strided, kind):
    both = make_input("normal", (*shape[:-1], 2 * shape[-1]), dtype, "cuda")
    gate, up = both.chunk(2, -1)
    if not strided:
        gate, up = gate.contiguous(), up.contiguous()
    dy = make_input("normal", shape, dtype, "cuda", seed=1)
    y, (dgate, dup) = glu.gated(gate, up, kind), glu.gated_backward(dy, gate, up, kind)
    assert_within_rounding(y, exact(gate.double(), kind) * up.double(), atol=4e-6)
    assert_within_rounding(dup, dy.double() * exact(gate.double(), kind), atol=4e-6)
    assert_within_rounding(dgate, dy.double() * up.double() * exact_backward(gate.double(), kind), atol=2e-5)
    for options in OPTIONS:
        fused = glu.gated_quantize(gate, up, kind, options, True)
        assert_same_bits(fused, [y, *quantize(y, options)])
        assert_same_bits(glu.gated_quantize(gate, up, kind, options, False), fused[1:])
        fused = glu.gated_backward_quantize(dy, gate, up, kind, options, True)
        assert_same_bits(fused, [dgate, dup, *quantize(dgate, options), *quantize(dup, options)])
        assert_same_bits(glu.gated_backward_quantize(dy, gate, up, kind, options, False), fused[2:])


@gpu
@needs_cuda
@pytest.mark.parametrize("shape", [(303, 300), (2048, 4096)])
def test_kernels_write_every_element(shape):
    x, dy, up = (make_input("normal", shape, torch.bfloat16, "cuda", seed=s) for s in range(3))
    options = TensorForm(E4M3, True, True, False, 0.0)
    run_poisoned(lambda: [act.activation(x, "gelu"), act.activation_backward(dy, x, "gelu")])
    run_poisoned(lambda: act.activation_quantize(x, "silu", options, True))
    run_poisoned(lambda: act.activation_backward_quantize(dy, x, "gelu_tanh", options, True, True))
    run_poisoned(lambda: [glu.gated(x, up, "gelu"), *glu.gated_backward(dy, x, up, "gelu")])
    run_poisoned(lambda: glu.gated_quantize(x, up, "silu", options, True))
    run_poisoned(lambda: glu.gated_backward_quantize(dy, x, up, "sigmoid", options, True))
