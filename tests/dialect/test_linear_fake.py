"""The shapes of a linear over protos: those of the real one."""

from __future__ import annotations

import itertools

import pytest
import torch

from te_dynamo import TensorProto, to_tensor_proto
from te_dynamo.dialect.linear import LinearConfig, LinearFwdArgs, linear_forward, linear_forward_fake
from te_dynamo.errors import InputError
from te_dynamo.recipe import by_name, names

K, N = 64, 48


def config(recipe: str, *, x: bool = True, weight: bool = True) -> LinearConfig:
    return LinearConfig.from_recipe(by_name(recipe), input_requires_grad=x, weight_requires_grad=weight)


def protos(
    *leading: int, k: int = K, n: int = N, bias: bool = True
) -> tuple[TensorProto, TensorProto, TensorProto | None]:
    shapes = ((*leading, k), (n, k), (n,) if bias else None)
    x, weight, b = (s and TensorProto(s, torch.bfloat16, device=torch.device("cpu")) for s in shapes)
    assert x and weight
    return x, weight, b


@pytest.mark.parametrize("recipe", names())
@pytest.mark.parametrize("leading", [(), (32,), (2, 16)])
@pytest.mark.parametrize(("x_grad", "weight_grad"), [*itertools.product([True, False], repeat=2)])
def test_they_are_those_of_the_real_linear(
    recipe: str, leading: tuple[int, ...], x_grad: bool, weight_grad: bool
) -> None:
    x, weight, bias = (torch.randn(p.shape).to(p.dtype) for p in protos(*leading) if p)
    setting = config(recipe, x=x_grad, weight=weight_grad)
    real_out, real_saved = linear_forward(LinearFwdArgs(x, weight, bias, setting))
    out, saved = linear_forward_fake(to_tensor_proto(x), to_tensor_proto(weight), bias.shape, setting)
    assert out == to_tensor_proto(real_out)
    buffers = iter(real_saved)
    for proto in saved:
        proto.check_layout({slot: next(buffers) for slot in proto.inner_names()})
    assert next(buffers, None) is None


def test_the_operation_makes_the_same() -> None:
    """te.linear's fake against its own implementation, slot for slot."""
    x, weight, bias = (torch.randn(p.shape).to(p.dtype) for p in protos(32) if p)
    for recipe in names():
        real = torch.ops.te.linear(x, weight, bias, config(recipe))
        with torch._subclasses.FakeTensorMode() as mode:
            fake = torch.ops.te.linear(*map(mode.from_tensor, (x, weight, bias)), config(recipe))
        assert [(t.shape, t.dtype, t.stride()) for t in fake] == [(t.shape, t.dtype, t.stride()) for t in real]


def test_bad_input() -> None:
    for shapes in (
        ((30, 64), (48, 32), None),
        ((30, 64), (2, 48, 64), None),
        ((30, 64), (48, 64), (32,)),
        ((), (48, 64), None),
    ):
        x, weight = (TensorProto(shape, torch.bfloat16) for shape in shapes[:2])
        with pytest.raises(InputError, match=r"linear: expected x \[..., K\], a weight \[N, K\] and a bias \[N\], got"):
            linear_forward_fake(x, weight, shapes[2], config("mxfp8"))
