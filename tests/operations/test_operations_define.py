"""Class definitions: what is wrong is a TypeError where the class is written, and names the class and the method."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from te_dynamo import BasicOperation, FusedOperation, FusibleOperation, Sequential
from te_dynamo.errors import OperationError
from te_dynamo.operations.basic import GELU, Bias, SiLU
from te_dynamo.operations.basic.activation import Activation


def method(self: Any, *args: Any, **keywords: Any) -> Any:
    raise AssertionError("only defined")


SPLIT = ("forward_compute", "forward_save_ctx", "forward_fake")


def define(bases: type | tuple[type, ...], *methods: str, **attributes: Any) -> type:
    """A class called Wrong with these methods."""
    bases = bases if isinstance(bases, tuple) else (bases,)
    return type("Wrong", bases, {**dict.fromkeys(methods, method), **attributes, "__module__": __name__})


def op(*methods: str) -> tuple[str, ...]:
    return tuple(f"op_{m}" for m in methods)


def fuser(*methods: str) -> tuple[str, ...]:
    return tuple(f"fuser_{m}" for m in methods)


class Legacy(BasicOperation):
    factor: float = 3.0

    def op_forward(self, ctx: Any, input: torch.Tensor, params: Any, **_: Any) -> torch.Tensor:
        ctx.factor = self.factor
        return input * self.factor

    def op_backward(self, ctx: Any, grad_output: torch.Tensor) -> Any:
        return grad_output * ctx.factor, ()


BAD: dict[str, tuple[Callable[[], type], str]] = {
    "half: compute": (
        lambda: define(BasicOperation, *op("forward_compute", "backward")),
        r"Wrong defines op_forward_compute without op_forward_save_ctx and op_forward_fake",
    ),
    "half: save_ctx": (
        lambda: define(BasicOperation, *op("forward_save_ctx", "forward_fake", "backward")),
        r"Wrong defines op_forward_save_ctx and op_forward_fake without op_forward_compute",
    ),
    "no fake": (
        lambda: define(BasicOperation, *op("forward_compute", "forward_save_ctx", "backward")),
        r"Wrong defines .* without op_forward_fake",
    ),
    "no backward": (lambda: define(BasicOperation, *op(*SPLIT)), r"Wrong defines a forward without op_backward"),
    "no forward": (
        lambda: define(BasicOperation, *op("backward")),
        r"Wrong defines no forward: op_forward_compute, op_forward_save_ctx and op_forward_fake, or op_forward",
    ),
    "legacy without backward": (
        lambda: define(BasicOperation, *op("forward")),
        r"Wrong defines a forward without op_backward",
    ),
    "mix of APIs": (
        lambda: define(BasicOperation, *op("forward", *SPLIT, "backward")),
        r"Wrong defines both op_forward, of the legacy API, and op_forward_compute, op_forward_save_ctx and op_forward_fake",
    ),
    "mix with one": (
        lambda: define(BasicOperation, *op("forward", "forward_fake", "backward")),
        r"Wrong defines both op_forward, of the legacy API, and op_forward_fake",
    ),
    "mix of op and fuser": (
        lambda: define(BasicOperation, *op(*SPLIT), *fuser("backward")),
        r"Wrong mixes op_forward_compute, .* with fuser_backward",
    ),
    "op_ with extra inputs": (
        lambda: define(BasicOperation, *op(*SPLIT, "backward"), num_extra_inputs=1),
        r"Wrong has extra inputs or outputs, which op_backward, .* cannot take: define the fuser_ methods",
    ),
    "half of fuser_": (
        lambda: define(BasicOperation, *fuser("forward_compute", "forward_fake", "backward"), num_extra_outputs=1),
        r"Wrong defines fuser_forward_compute and fuser_forward_fake without fuser_forward_save_ctx",
    ),
    "fuser_ without backward": (
        lambda: define(BasicOperation, *fuser(*SPLIT), num_extra_outputs=1),
        r"Wrong defines a forward without fuser_backward",
    ),
    "misspelt": (
        lambda: define(BasicOperation, *op(*SPLIT, "backwards")),
        r"Wrong: no operation has a method op_backwards; did you mean op_backward\?",
    ),
    "another system's": (
        lambda: define(BasicOperation, "op_setup", *op(*SPLIT, "backward")),
        r"Wrong: no operation has a method op_setup",
    ),
    "flag by hand": (
        lambda: define(BasicOperation, *op(*SPLIT, "backward"), _use_split_forward=False),
        r"Wrong: _use_split_forward is found from the methods",
    ),
    "fused: half": (
        lambda: define(FusedOperation, *fuser("forward_compute")),
        r"Wrong defines fuser_forward_compute and fuser_forward_fake|Wrong defines .*without fuser_forward_save_ctx",
    ),
    "fused: save_ctx alone": (
        lambda: define(FusedOperation, *fuser("forward_save_ctx")),
        r"Wrong defines .*without fuser_forward_compute",
    ),
    "fused: joint without a fake": (
        lambda: define(FusedOperation, *fuser("forward_compute", "forward_save_ctx", "backward")),
        r"Wrong defines .* without fuser_forward_fake",
    ),
    "fused: mix": (
        lambda: define(FusedOperation, *fuser("forward", "forward_compute")),
        r"Wrong defines both fuser_forward, of the legacy API, and fuser_forward_compute",
    ),
    "fused: op_": (
        lambda: define(FusedOperation, *op("backward")),
        r"Wrong is a fused operation and runs no op_backward: define the fuser_ methods",
    ),
    "fused: nothing": (lambda: define(FusedOperation), r"Wrong defines neither a forward .* nor fuser_backward"),
    "fused: extra inputs": (
        lambda: define(FusedOperation, *fuser("backward"), num_extra_inputs=1),
        r"Wrong.num_extra_inputs: a fused operation has those of its basic operations",
    ),
    "neither kind": (
        lambda: define(FusibleOperation, *fuser(*SPLIT, "backward")),
        r"Wrong: an operation is a BasicOperation or a FusedOperation",
    ),
    "split on top of legacy, half": (
        lambda: define(Legacy, *op("forward_compute")),
        r"Wrong defines op_forward_compute without op_forward_save_ctx and op_forward_fake",
    ),
    "name that is taken": (
        lambda: type("GELU", (Activation,), {"__module__": __name__}),
        r"test_operations_define.GELU: te::GELU is the operation of te_dynamo.operations.basic.activation.GELU already",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_definition(name: str) -> None:
    make, message = BAD[name]
    with pytest.raises(TypeError, match=message):
        make()


# ---- definitions that are right


def test_defining_a_class_registers_its_operations() -> None:
    class Doubled(Activation):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        def backward(self, dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            return dy * 2

    assert torch.ops.te.Doubled.default is Doubled.forward_overload
    assert torch.ops.te.Doubled_backward.default is Doubled.backward_overload
    x = torch.randn(3, requires_grad=True)
    assert torch.equal(torch.autograd.grad(Sequential(Doubled())(x).sum(), x)[0], torch.full((3,), 2.0))


def test_a_subclass_with_op_forward_leaves_the_split_path() -> None:
    class LegacyGELU(GELU):
        def op_forward(self, ctx: Any, input: torch.Tensor, params: Any, **_: Any) -> torch.Tensor:
            ctx.save_for_backward(input)
            return input + 1

    class SplitAgain(LegacyGELU):
        def op_forward_compute(self, input: torch.Tensor, params: Any, **_: Any) -> Any:
            return input + 2, [input]

    x = torch.zeros(3)
    assert GELU._use_split_forward and not LegacyGELU._use_split_forward and SplitAgain._use_split_forward
    assert not hasattr(LegacyGELU, "missing") and Sequential(LegacyGELU())(x).tolist() == [1, 1, 1]
    assert Sequential(SplitAgain())(x).tolist() == [2, 2, 2]


def test_a_legacy_operation_runs_twice_backward() -> None:
    x = torch.randn(4, requires_grad=True)
    y = Sequential(GELU(), Legacy(), SiLU())(x)
    first = torch.autograd.grad(y.sum(), x, retain_graph=True)
    assert torch.equal(first[0], torch.autograd.grad(y.sum(), x)[0])


@pytest.mark.parametrize("field", [torch.ones(2), torch.nn.Linear(2, 2), [1, 2]])
def test_fields_are_values(field: Any) -> None:
    with pytest.raises(TypeError, match=rf"Legacy.factor: expected a value .* got {type(field).__name__}"):
        Legacy(field)


def test_nothing_but_tensors_crosses_to_backward() -> None:
    class Smuggler(GELU):
        def op_forward_save_ctx(self, ctx: Any, tensors_to_save: Any) -> None:
            ctx.state = "sizes"

    x = torch.randn(4, requires_grad=True)
    with pytest.raises(OperationError, match=r"ctx.state = ...: nothing but tensors crosses from forward to backward"):
        Sequential(Smuggler())(x)


class Both(FusedOperation):
    def fuser_backward(self, ctxs: Any, grad_output: Any, grad_extra_outputs: Any) -> Any:
        raise AssertionError


def test_what_a_fused_operation_is_made_of() -> None:
    with pytest.raises(TypeError, match=r"Both: a fused operation is made of basic ones, got Both"):
        Both((Both((GELU(),)), GELU()))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"Both: a fused operation of no operations"):
        Both(())
    with pytest.raises(
        TypeError, match=r"Both: Legacy has the legacy op_forward, which a split forward cannot replace"
    ):
        Both((Legacy(), Bias(4)))
