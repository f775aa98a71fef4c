"""What Sequential and its operations refuse, by an error that names the operation: results, inputs and settings that are wrong."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import te_dynamo
from te_dynamo import Sequential
from te_dynamo.errors import InputError, InvalidOptionError, OperationError, UnsupportedError
from te_dynamo.operations.basic import (
    GELU,
    AddExtraInput,
    BasicLinear,
    Bias,
    Identity,
    LayerNorm,
    Quantize,
    RMSNorm,
    ScaledSReLU,
    ScaledSwiGLU,
)


class WrongCount(Identity):
    def op_backward(self, ctx: Any, grad_output: torch.Tensor) -> Any:
        return grad_output, (grad_output,)


class WrongResult(Identity):
    def op_forward_compute(self, input: torch.Tensor, params: Any, **_: Any) -> Any:
        return input, [], []


class NoGrad(Identity):
    def op_backward(self, ctx: Any, grad_output: torch.Tensor) -> Any:
        return None, ()


class NoBiasGrad(Bias):
    def op_backward(self, ctx: Any, grad_output: torch.Tensor) -> Any:
        return grad_output, (None,)


class OtherShape(Identity):
    def op_backward(self, ctx: Any, grad_output: torch.Tensor) -> Any:
        return grad_output[None], ()


class NoOutput(Identity):
    def op_forward_compute(self, input: torch.Tensor, params: Any, **_: Any) -> Any:
        return None, []


def test_wrong_numbers_of_results_name_the_operation() -> None:
    x = torch.randn(3, requires_grad=True)
    with pytest.raises(OperationError, match=r"WrongCount: expected 0 grads of the parameters of WrongCount, got 1"):
        Sequential(WrongCount())(x).sum().backward()
    with pytest.raises((OperationError, ValueError), match=r"WrongResult|too many values"):
        Sequential(WrongResult())(x)
    for ops in ((GELU(), NoGrad()), (NoGrad(), GELU())):
        with pytest.raises(
            OperationError, match=r"NoGrad: its backward gives no gradient for its input, which requires one"
        ):
            Sequential(*ops)(x).sum().backward()
    with pytest.raises(
        OperationError, match=r"NoBiasGrad: .* no gradient for one of the parameters of NoBiasGrad, which requires"
    ):
        Sequential(GELU(), NoBiasGrad(3))(x).sum().backward()
    with pytest.raises(
        OperationError, match=r"OtherShape: .* gradient of the wrong shape, \[1, 3\] for an input \[3\]"
    ):
        Sequential(Bias(3), OtherShape())(x).sum().backward()
    with pytest.raises(OperationError, match=r"NoOutput: its output is a NoneType, not a tensor"):
        Sequential(NoOutput())(x)


@pytest.mark.parametrize("backend", [None, "aot_eager"])
@pytest.mark.parametrize(
    ("ops", "given", "message"),
    [
        (
            (BasicLinear(32, 64),),
            (4, 48),
            r"BasicLinear\(32, 64, .*\): expected an input \[\.\.\., 32\], got \[4, 48\]",
        ),
        ((BasicLinear(32, 64), BasicLinear(32, 64)), (4, 32), r"BasicLinear\(32, 64, .*\): expected .* got \[4, 64\]"),
        ((BasicLinear(32, 64), Bias(1)), (4, 32), r"Bias\(1\): expected an input \[\.\.\., 1\], got \[4, 64\]"),
        ((RMSNorm(1), GELU()), (4, 32), r"RMSNorm\(1\): expected an input \[\.\.\., 1\], got \[4, 32\]"),
        ((BasicLinear(32, 64),), (), r"expected an input \[\.\.\., 32\], got \[\]"),
    ],
)
def test_an_input_of_another_width_names_the_operation(ops: Any, given: Any, message: str, backend: str | None) -> None:
    module = Sequential(*ops, recipe=te_dynamo.recipe.Float8CurrentScaling())
    run = module if backend is None else torch.compile(module, backend=backend)
    with pytest.raises((InputError, torch._dynamo.exc.TorchRuntimeError), match=message):
        run(torch.zeros(given, requires_grad=True))


def test_an_input_of_another_kind_names_the_operation() -> None:
    module = Sequential(BasicLinear(32, 64), AddExtraInput(), recipe=te_dynamo.recipe.Float8CurrentScaling())
    x = torch.zeros(4, 32)
    for extra in (None, 1.0):
        with pytest.raises(InputError, match=f"expected tensors .* got a {type(extra).__name__}"):
            module(x, extra)
    with pytest.raises(InputError, match=r"BasicLinear\(32, 64, .* got torch.float64"):
        module(x.double(), torch.zeros(4, 64))


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
def test_an_input_that_is_not_floating_is_refused(dtype: torch.dtype) -> None:
    """The weight would be cast to it: zeros of integers, and no imaginary part."""
    for run in (Sequential(BasicLinear(8, 8)), Sequential(GELU())):
        with pytest.raises(InputError, match=f"expected an input of floating dtype, got {dtype}"):
            run(torch.ones(4, 8, dtype=dtype))


@pytest.mark.parametrize("fusions", [True, False])
@pytest.mark.parametrize(("name", "shape"), [("0.weight", (1,)), ("1.weight", (32, 1)), ("2.bias", (1,))])
def test_a_parameter_of_another_shape_does_not_broadcast(name: str, shape: tuple[int, ...], fusions: bool) -> None:
    module = Sequential(RMSNorm(64), BasicLinear(64, 32), Bias(32), fusions=fusions)
    position, parameter = name.split(".")
    setattr(getattr(module, position), parameter, torch.nn.Parameter(torch.randn(shape)))
    message = rf"expected a {parameter} \[.*\], got {re.escape(str(list(shape)))}"
    with pytest.raises(InputError, match=message):
        module(torch.randn(4, 64))
    with pytest.raises(Exception, match=message), torch.no_grad():
        torch.compile(module, backend="aot_eager", fullgraph=True)(torch.randn(4, 64))


@pytest.mark.parametrize("make", [lambda n: BasicLinear(n, 32), Bias, RMSNorm, LayerNorm])
def test_sizes_are_positive_whole_numbers(make: Any) -> None:
    for wrong in (0, -1, 32.0, True):
        with pytest.raises(InvalidOptionError, match=rf"features: expected a positive whole number, got {wrong}"):
            make(wrong)


def test_a_torch_func_transform_is_an_error_that_says_so() -> None:
    for transformed in (torch.func.vmap, torch.func.grad):
        with pytest.raises(UnsupportedError, match=r"Sequential: inside a torch.func transform"):
            transformed(Sequential(GELU()))(torch.randn(3, 4))


@pytest.mark.parametrize("shape", [(16, 1), (1,), (8,), (16, 32)])
@pytest.mark.parametrize("compiled", [False, True])
def test_scales_that_are_not_one_for_each_row(shape: tuple[int, ...], compiled: bool) -> None:
    """They broadcast: [16, 1] made [16, 16, 16] of [16, 32]."""
    torch._dynamo.reset()
    for op in (ScaledSwiGLU(), ScaledSReLU()):
        module = Sequential(op)
        run = torch.compile(module, backend="eager") if compiled else module
        with pytest.raises(
            Exception, match=rf"{type(op).__name__}.*: expected a scale for each row, \[16\], got"
        ) as found:
            run(torch.ones(16, 32), torch.ones(shape))
        assert compiled or found.type is InputError


def test_settings_of_another_type() -> None:
    with pytest.raises(TypeError, match="Quantize: expected a quantizer or None, got True"):
        Quantize(True)
    with pytest.raises(InvalidOptionError, match=r"fusions is True or False, got \['-linear'\]"):
        Sequential(Bias(8), fusions=["-linear"])


def test_one_value_of_requires_grad_for_each_tensor() -> None:
    sequence = te_dynamo.Sequential(te_dynamo.ops.LayerNorm(32), te_dynamo.ops.BasicLinear(32, 16)).sequence
    with pytest.raises(InputError, match=r"2 operations: expected 4 values of requires_grad, .*; got 2"):
        sequence.program([True, True], training=True)
