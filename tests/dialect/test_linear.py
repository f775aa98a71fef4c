"""te.linear by itself: what it computes, what it saves, and what it refuses."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from te_dynamo.dialect.linear import LinearConfig, LinearFwdArgs, linear_forward
from te_dynamo.errors import UnsupportedError
from te_dynamo.recipe import Float8CurrentScaling

CONFIG = LinearConfig.from_recipe(Float8CurrentScaling(), input_requires_grad=True, weight_requires_grad=True)


def rounded(x: torch.Tensor, fp8_dtype: torch.dtype) -> torch.Tensor:
    """x after a round trip through FP8 with one scale, written out in float64 (amax > 0 and finite)."""
    fmax = torch.finfo(fp8_dtype).max
    scale = (torch.tensor(fmax, dtype=torch.float32) / x.float().abs().max()).double()
    exact = x.double() * scale
    return exact.float().clamp(-fmax, fmax).to(fp8_dtype).double() / scale


def operands(*leading: int, n: int = 48, k: int = 32, dtype: torch.dtype = torch.bfloat16):
    torch.manual_seed(0)
    x = torch.randn(*leading, k, dtype=dtype, requires_grad=True)
    weight = torch.randn(n, k, dtype=dtype, requires_grad=True)
    bias = torch.randn(n, dtype=dtype, requires_grad=True)
    return x, weight, bias


@pytest.mark.parametrize("leading", [(), (5,), (2, 7), (2, 3, 4)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_forward_and_backward_against_a_written_out_formula(leading, dtype) -> None:
    x, weight, bias = operands(*leading, dtype=dtype)
    y = torch.ops.te.linear(x, weight, bias, CONFIG)[0]
    dy = torch.randn_like(y)
    y.backward(dy)

    e4, e5 = torch.float8_e4m3fn, torch.float8_e5m2
    x8, w8, dy8 = rounded(x.detach(), e4), rounded(weight.detach(), e4), rounded(dy, e5)
    flat_x, flat_dy = x8.reshape(-1, 32), dy8.reshape(-1, 48)
    tolerance = {"rtol": torch.finfo(dtype).eps * 2, "atol": 1e-4}
    torch.testing.assert_close(y, (x8 @ w8.t() + bias.double()).to(dtype), **tolerance)
    torch.testing.assert_close(x.grad, (dy8 @ w8).to(dtype), **tolerance)
    torch.testing.assert_close(weight.grad, (flat_dy.t() @ flat_x).to(dtype), **tolerance)
    torch.testing.assert_close(bias.grad, dy.double().reshape(-1, 48).sum(0).to(dtype), **tolerance)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("x_dtype", "dtype"), [(torch.bfloat16, torch.float32), (torch.float16, torch.bfloat16)])
def test_a_backward_in_high_precision_of_operands_of_two_dtypes(x_dtype, dtype, transposed) -> None:
    config = LinearConfig.from_recipe(
        Float8CurrentScaling(backward="high_precision"),
        input_requires_grad=True, weight_requires_grad=True, weight_transposed=transposed,
    )  # fmt: skip
    (x, _, _), (_, weight, bias) = operands(5, dtype=x_dtype), operands(dtype=dtype)
    stored = (weight.t() if transposed else weight).detach().requires_grad_()
    y = torch.ops.te.linear(x, stored, bias, config)[0]
    dy = torch.randn_like(y)
    dx, dweight = torch.autograd.grad(y, (x, stored), dy)
    expected = dy.t() @ x.detach()
    assert torch.equal(dx, dy @ weight.detach().to(x_dtype))
    torch.testing.assert_close(dweight, (expected.t() if transposed else expected).to(dtype))


@pytest.mark.parametrize(("input_grad", "weight_grad"), [(True, True), (True, False), (False, True), (False, False)])
def test_saves_only_what_backward_needs(input_grad: bool, weight_grad: bool) -> None:
    config = LinearConfig.from_recipe(
        Float8CurrentScaling(), input_requires_grad=input_grad, weight_requires_grad=weight_grad
    )
    x, weight, bias = operands(6)
    x.requires_grad_(input_grad), weight.requires_grad_(weight_grad)
    results = torch.ops.te.linear(x, weight, bias, config)
    assert len(results) == 1 + 2 * input_grad + 2 * weight_grad
    assert {r.dtype for r in results[1:]} <= {torch.float8_e4m3fn, torch.float32}
    results[0].sum().backward()
    assert (x.grad is not None, weight.grad is not None, bias.grad is not None) == (input_grad, weight_grad, True)


def test_backward_twice_with_retain_graph() -> None:
    x, weight, bias = operands(6)
    y = torch.ops.te.linear(x, weight, bias, CONFIG)[0].sum()
    y.backward(retain_graph=True)
    first = x.grad.clone()
    y.backward()
    torch.testing.assert_close(x.grad, 2 * first, rtol=0, atol=0)


def test_double_backward_says_so() -> None:
    x, weight, bias = operands(6)
    y = torch.ops.te.linear(x, weight, bias, CONFIG)[0]
    (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(UnsupportedError, match=r"double backward.*does not support.*backward=\"high_precision\""):
        dx.sum().backward()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 16, 19])
def test_the_operation_is_what_torch_expects_of_it(rows: int, bias: bool) -> None:
    """Schema, fake against real, autograd registration, and AOT dispatch with static and dynamic shapes."""
    x, weight, b = operands(rows)
    torch.library.opcheck(
        torch.ops.te.linear.default,
        (x, weight, b if bias else None, CONFIG),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )


def test_operands_that_are_not_contiguous() -> None:
    _, weight, bias = operands(6)
    wide = torch.randn(32, 6, dtype=torch.bfloat16).t().requires_grad_()
    y = torch.ops.te.linear(wide, weight, bias, CONFIG)[0]
    expected = torch.ops.te.linear(wide.detach().contiguous(), weight, bias, CONFIG)[0]
    torch.testing.assert_close(y, expected, rtol=0, atol=0)
    (gradient,) = torch.autograd.grad(y.t().contiguous().sum(), wide)
    assert gradient.shape == wide.shape


class TargetsSeen(TorchDispatchMode):
    """The names of what is dispatched outside our operations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def test_two_dimensional_operands_need_no_view() -> None:
    """The GEMM's [M, N] is the output as it is: no view of it in the graph, none to pay for in eager."""
    _, weight, bias = operands(6)
    for leading, views in (((6,), 0), ((2, 3), 1)):
        seen = TargetsSeen()
        with torch.no_grad(), seen:
            linear_forward(LinearFwdArgs(torch.randn(*leading, 32, dtype=torch.bfloat16), weight, bias, CONFIG))
        assert (
            sum(name.startswith(("aten::view", "aten::reshape", "aten::_unsafe_view")) for name in seen.names) == views
        )
