"""te.grouped_linear by itself: what it computes, what it saves, what its weights' quantizer holds, and what it refuses."""

from __future__ import annotations

import dataclasses
import itertools
import pickle

import pytest
import torch
from helpers.oracles.quantizer_cases import USAGES, same_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from te_dynamo import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8GroupedQuantizer,
    QuantizedTensor,
    QuantizedTensorStorage,
    TensorProto,
    to_tensor_proto,
)
from te_dynamo.dialect.grouped_linear import (
    GroupedLinearBwdArgs,
    GroupedLinearConfig,
    GroupedLinearFwdArgs,
    grouped_linear_backward,
    grouped_linear_forward,
    grouped_linear_forward_fake,
)
from te_dynamo.errors import InputError, QuantizationError, UnsupportedError
from te_dynamo.recipe import Float8CurrentScaling

G, N, K = 3, 32, 48
BOTH = [(True, True), (True, False), (False, True), (False, False)]


def config(transposed: bool = False, x: bool = True, weight: bool = True) -> GroupedLinearConfig:
    return GroupedLinearConfig.from_recipe(
        Float8CurrentScaling(), weight_transposed=transposed, input_requires_grad=x, weight_requires_grad=weight
    )


def operands(sizes=(5, 0, 14), behind: int = 0, transposed: bool = False, dtype: torch.dtype = torch.bfloat16):
    """x [M, K], weight [G, N, K] or [G, K, N], the ends of the groups."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(sum(sizes) + behind, K, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(len(sizes), N, K, generator=generator).to(dtype)
    weight = weight.transpose(1, 2).contiguous() if transposed else weight
    return x, weight.requires_grad_(), torch.tensor(sizes).cumsum(0).int()


def rounded(x: torch.Tensor, fp8_format: str = "e4m3") -> torch.Tensor:
    """x after a round trip through FP8 with one scale, in float64."""
    return Float8CurrentScalingQuantizer(fp8_format=fp8_format).quantize(x.detach().float()).dequantize().double()


def by_loop(x, weight, offs, dy):
    """(out, dx, dweight) in float64 of a loop over the groups, each with weights in a scale of their own."""
    x8, dy8 = rounded(x), rounded(dy, "e5m2")
    out = torch.zeros(x.shape[0], weight.shape[1], dtype=torch.float64)
    dx, dweight = torch.zeros_like(x8), torch.zeros(weight.shape, dtype=torch.float64)
    start = 0
    for group, end in enumerate(offs.tolist()):
        w8, rows = rounded(weight[group]), slice(start, end)
        out[rows], dx[rows], dweight[group] = x8[rows] @ w8.t(), dy8[rows] @ w8, dy8[rows].t() @ x8[rows]
        start = end
    return out, dx, dweight


@settings(max_examples=10, deadline=None)
@given(
    st.lists(st.integers(0, 20), min_size=1, max_size=5).filter(any),
    st.integers(0, 5),
    st.booleans(),
    st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
)
def test_forward_and_backward_are_a_loop_over_the_groups(sizes, behind, transposed, dtype) -> None:
    x, weight, offs = operands(sizes, behind, transposed, dtype)
    y = torch.ops.te.grouped_linear(x, weight, offs, config(transposed))[0]
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    y.backward(dy)
    as_nk = weight.detach().transpose(1, 2) if transposed else weight
    out, dx, dweight = by_loop(x, as_nk, offs, dy)
    tolerance = {"rtol": torch.finfo(dtype).eps * 2, "atol": 1e-4}
    assert_close(y, out.to(dtype), **tolerance)
    assert_close(x.grad, dx.to(dtype), **tolerance)
    assert_close(weight.grad, (dweight.transpose(1, 2) if transposed else dweight).to(dtype), **tolerance)


def test_both_layouts_of_the_weight_give_the_same_bits() -> None:
    results = []
    for transposed in (False, True):
        x, weight, offs = operands((7, 9, 3), 2, transposed)
        y = torch.ops.te.grouped_linear(x, weight, offs, config(transposed))[0]
        y.backward(torch.ones_like(y))
        results.append((y, x.grad, weight.grad.transpose(1, 2) if transposed else weight.grad))
    assert all(same_bits(a.detach(), b.detach()) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize(("transposed", "grads"), list(itertools.product([False, True], BOTH)))
def test_saves_only_what_backward_needs(transposed: bool, grads: tuple[bool, bool]) -> None:
    """Tensor for tensor what the protos say, and so the fake."""
    x, weight, offs = operands(transposed=transposed)
    x.requires_grad_(grads[0]), weight.requires_grad_(grads[1])
    setting = config(transposed, *grads)
    out, saved = grouped_linear_forward(GroupedLinearFwdArgs(x, weight, offs, setting))
    assert len(saved) == 2 * sum(grads)
    out_proto, protos = grouped_linear_forward_fake(to_tensor_proto(x), to_tensor_proto(weight), setting)
    assert (out_proto.shape, out_proto.dtype, out_proto.requires_grad) == (out.shape, out.dtype, any(grads))
    buffers = iter(saved)
    for proto in protos:
        proto.check_layout({slot: next(buffers) for slot in proto.inner_names()})
    assert next(buffers, None) is None
    torch.library.opcheck(
        torch.ops.te.grouped_linear.default,
        (x, weight, offs, setting),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )
    if any(grads):
        y = torch.ops.te.grouped_linear(x, weight, offs, setting)[0]
        y.sum().backward()
    assert (x.grad is not None, weight.grad is not None) == grads


def test_the_helpers_are_the_operation() -> None:
    """What a caller outside autograd uses: one argument object each."""
    x, weight, offs = operands()
    y = torch.ops.te.grouped_linear(x, weight, offs, config())[0]
    dy = torch.randn_like(y)
    y.backward(dy)
    with torch.no_grad():
        out, saved = grouped_linear_forward(GroupedLinearFwdArgs(x, weight, offs, config()))
        args = GroupedLinearBwdArgs(tuple(saved[:2]), tuple(saved[2:]), offs, x.dtype, weight.dtype, config())
        dx, dweight = grouped_linear_backward(args, dy)
        nothing = dataclasses.replace(args, config=config(x=False, weight=False))
        assert grouped_linear_backward(nothing, dy) == (None, None)
    assert same_bits(out, y.detach()) and same_bits(dx, x.grad) and same_bits(dweight, weight.grad)


def test_backward_twice_and_double_backward() -> None:
    x, weight, offs = operands()
    y = torch.ops.te.grouped_linear(x, weight, offs, config())[0]
    first = torch.autograd.grad(y.sum(), (x, weight), retain_graph=True)
    again = torch.autograd.grad(y.sum(), (x, weight), retain_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(UnsupportedError, match="double backward"):
        dx.sum().backward()


# ---- the quantizer of weights of a group


@pytest.mark.parametrize(("rowwise", "columnwise"), USAGES)
@pytest.mark.parametrize("shape", [(3, 20, 48), (1, 16, 16)], ids=str)
def test_quantizer_holds_each_group_in_current_scaling(shape, rowwise: bool, columnwise: bool) -> None:
    quantizer = Float8GroupedQuantizer(rowwise, columnwise)
    x = (torch.randn(shape) * torch.arange(1, shape[0] + 1)[:, None, None]).bfloat16()
    held = quantizer.quantize(x)
    assert isinstance(held, QuantizedTensor) and held.shape == shape
    to_tensor_proto(held).check_layout(held.to_storage().named_buffers())
    single = Float8CurrentScalingQuantizer(rowwise, columnwise)
    assert same_bits(held.dequantize(), torch.stack([single.quantize(group).dequantize() for group in x]))
    names, metadata = held.to_storage().__tensor_flatten__()
    rebuilt = QuantizedTensorStorage.__tensor_unflatten__({n: getattr(held.to_storage(), n) for n in names}, metadata)
    assert same_bits(rebuilt.dequantize(), held.dequantize())


def test_quantizer_is_a_value() -> None:
    quantizer = Float8GroupedQuantizer(fp8_format="e5m2", power_of_two_scale=True)
    text, names = quantizer.__fx_repr__()
    assert eval(text, dict(names)) == quantizer == pickle.loads(pickle.dumps(quantizer))
    assert quantizer.with_usage(columnwise=False).with_usage(columnwise=True) == quantizer
    assert quantizer.describe() == "grouped e5m2[row+column, pow2]" and quantizer != Float8GroupedQuantizer()


def test_config_is_a_value() -> None:
    setting = config(transposed=True, x=False)
    text, names = setting.__fx_repr__()
    assert eval(text, dict(names)) == setting != config(x=False)
    assert setting.describe() == (
        "grouped linear(x e4m3[row+column], w grouped e4m3[column], dy e5m2[row+column]) of [G, K, N]"
    )


def test_bad_input() -> None:
    with pytest.raises(InputError, match=r"expected a tensor \[G, N, K\], got the shape \[4, 4\]"):
        Float8GroupedQuantizer().quantize(torch.ones(4, 4))
    with pytest.raises(InputError, match=r"expected a tensor \[G, N, K\]"):
        TensorProto((4,), torch.bfloat16, Float8GroupedQuantizer())
    good = config()
    with pytest.raises(
        QuantizationError, match=r"expected x, the weight and dy in one format, got e4m3\[row\+column\], e4m3"
    ):
        dataclasses.replace(good, weight_quantizer=Float8CurrentScalingQuantizer())
    with pytest.raises(QuantizationError, match="grouped linear: expected x, the weight and dy in one format"):
        dataclasses.replace(good, input_quantizer=Float8BlockQuantizer())
    with pytest.raises(QuantizationError, match="expected a quantizer of dy, of which wgrad is made"):
        dataclasses.replace(good, grad_output_quantizer=None)
    with pytest.raises(QuantizationError, match="dgrad: e5m2 x e5m2"):
        dataclasses.replace(good, weight_quantizer=Float8GroupedQuantizer(fp8_format="e5m2"))
    x, weight, offs = operands()
    call = torch.ops.te.grouped_linear
    with pytest.raises(ValueError, match=r"offs int32 \[3\], the end of each group, got torch.int64"):
        call(x, weight, offs.long(), good)
    with pytest.raises(ValueError, match=r"offs int32 \[3\].*\(2,\)"):
        call(x, weight, offs[:2], good)
    with pytest.raises(ValueError, match=r"a \[M, K\] and b \[G, N, K\]"):
        call(x[:, :32], weight, offs, good)
    with pytest.raises(InputError, match=r"expected a tensor \[G, N, K\]"):
        call(x, weight[0], offs, good)
    with torch._subclasses.FakeTensorMode() as mode:
        fake = [mode.from_tensor(t) for t in (x, weight, offs)]
        with pytest.raises(InputError, match=r"x has 32 columns, the weight \(3, 32, 48\) takes 48"):
            call(fake[0][:, :32], *fake[1:], good)
        with pytest.raises(InputError, match=r"expected x \[M, K\] and a weight of three dimensions"):
            call(fake[0][None], *fake[1:], good)
