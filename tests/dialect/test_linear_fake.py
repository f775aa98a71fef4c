"""The shapes of a linear over protos: those of the real one, and those of ranks that share it."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from te_dynamo import TensorProto, to_tensor_proto
from te_dynamo.dialect.linear import LinearBwdArgs, LinearConfig, LinearFwdArgs, linear_backward, linear_forward
from te_dynamo.dialect.linear_fake import (
    LinearBwdProtos,
    LinearFwdProtos,
    Parallel,
    linear_backward_fake,
    linear_forward_fake,
)
from te_dynamo.errors import InputError, InvalidOptionError
from te_dynamo.quantized.tensor_proto import check_layout
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
    out, saved = linear_forward_fake(LinearFwdProtos(*map(to_tensor_proto, (x, weight, bias)), setting))
    assert dataclasses.replace(out, requires_grad=False) == to_tensor_proto(real_out)
    assert out.requires_grad == (x_grad or weight_grad)
    buffers = iter(real_saved)
    for proto in saved:
        check_layout(proto, {slot: next(buffers) for slot in proto.inner_names()})
    assert next(buffers, None) is None

    # Columnwise operands of x, then of the weight, as many tensors each.
    per_operand = len(real_saved) // max(1, len(saved))
    of_x = per_operand * weight_grad
    real = linear_backward(
        LinearBwdArgs(
            x_saved=tuple(real_saved[:of_x]),
            weight_saved=tuple(real_saved[of_x:]),
            requires_dgrad=x_grad,
            requires_wgrad=weight_grad,
            requires_bias_grad=True,
            x_dtype=x.dtype,
            weight_dtype=weight.dtype,
            bias_dtype=bias.dtype,
            config=setting,
        ),
        torch.ones_like(real_out),
    )
    given = (to_tensor_proto(t) for t in (torch.ones_like(real_out), x, weight, bias))
    fake = linear_backward_fake(LinearBwdProtos(*given, setting, requires_bias_grad=True))
    assert fake == tuple(None if gradient is None else to_tensor_proto(gradient) for gradient in real)


def test_the_operation_makes_the_same() -> None:
    """te.linear's fake against its own implementation, slot for slot."""
    x, weight, bias = (torch.randn(p.shape).to(p.dtype) for p in protos(32) if p)
    for recipe in names():
        real = torch.ops.te.linear(x, weight, bias, config(recipe))
        with torch._subclasses.FakeTensorMode() as mode:
            fake = torch.ops.te.linear(*map(mode.from_tensor, (x, weight, bias)), config(recipe))
        assert [(t.shape, t.dtype, t.stride()) for t in fake] == [(t.shape, t.dtype, t.stride()) for t in real]


@pytest.mark.parametrize(
    ("parallel", "leading"),
    [
        (Parallel(), 32),
        (Parallel("column", 4), 32),
        (Parallel("row", 4), 32),
        (Parallel("column", 4, sequence_parallel=True), 128),
        (Parallel("row", 4, sequence_parallel=True), 8),
    ],
)
def test_sequence_parallelism_changes_the_outputs_leading_dimension(parallel: Parallel, leading: int) -> None:
    x, weight, bias = protos(32, 2)
    setting = config("mxfp8")
    out, saved = linear_forward_fake(LinearFwdProtos(x, weight, bias, setting, parallel))
    assert out.shape == (leading, 2, N)
    assert [proto.shape for proto in saved] == [x.shape, weight.shape], "what is saved is the rank's own"
    assert all(not proto.quantizer.rowwise and proto.quantizer.columnwise for proto in saved if proto.quantizer)
    dy = TensorProto(out.shape, out.dtype, device=out.device)
    args = LinearBwdProtos(dy, x, weight, bias, setting, requires_bias_grad=True, parallel=parallel)
    assert linear_backward_fake(args) == (x, weight, bias), "the gradients are the rank's own"


def test_the_output_requires_grad_also_through_the_bias() -> None:
    x, weight, bias = protos(32)
    assert bias is not None
    setting = config("mxfp8", x=False, weight=False)
    for requires_grad in (True, False):
        given = dataclasses.replace(bias, requires_grad=requires_grad)
        out, saved = linear_forward_fake(LinearFwdProtos(x, weight, given, setting))
        assert out.requires_grad == requires_grad and saved == []


def test_nobody_asks_for_a_gradient() -> None:
    x, weight, _ = protos(32, bias=False)
    out, _ = linear_forward_fake(LinearFwdProtos(x, weight, None, config("mxfp8", x=False, weight=False)))
    args = LinearBwdProtos(out, x, weight, None, config("mxfp8", x=False, weight=False))
    assert linear_backward_fake(args) == (None, None, None)


def test_bad_input() -> None:
    x, weight, bias = protos(30)
    with pytest.raises(InputError, match=r"4 ranks cannot share an output whose leading dimension is 30"):
        linear_forward_fake(
            LinearFwdProtos(x, weight, bias, config("mxfp8"), Parallel("row", 4, sequence_parallel=True))
        )
    with pytest.raises(InputError, match=r"dy has the shape \(30, 64\), the output \(30, 48\)"):
        linear_backward_fake(LinearBwdProtos(x, x, weight, bias, config("mxfp8")))
    for shapes in (
        ((30, 64), (48, 32), None),
        ((30, 64), (2, 48, 64), None),
        ((30, 64), (48, 64), (32,)),
        ((), (48, 64), None),
    ):
        given = (shape if shape is None else TensorProto(shape, torch.bfloat16) for shape in shapes)
        with pytest.raises(InputError, match=r"linear: expected x \[..., K\], a weight \[N, K\] and a bias \[N\], got"):
            linear_forward_fake(LinearFwdProtos(*given, config("mxfp8")))
    with pytest.raises(InvalidOptionError, match=r"expected mode 'column', 'row' or None, got 'diagonal'"):
        Parallel("diagonal")  # type: ignore[arg-type]
    with pytest.raises(InvalidOptionError, match="2 ranks do not share a linear of mode None"):
        Parallel(tp_size=2)
