"""One call of a list of operations with a fused or an unfused forward and backward, for tests that compare them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Optional

import torch

from te_dynamo.operations import BasicOperation, FusedOperation, FusibleOperation, OperationFuser
from te_dynamo.operations.run import Call, first_needing_grad, run_backward, run_forward
from te_dynamo.recipe import Recipe

TOLERANCE = {
    "high": dict(rtol=1e-3, atol=1e-5),
    "fp8": dict(rtol=0.125, atol=0.0675),
}
"""Of products in high precision (on fp32), and of FP8."""


@dataclasses.dataclass
class Results:
    """outputs: the output and the extra ones. saved: what each basic operation's context kept. grads: of the input, then of every
    parameter, then of every extra input; None where there is none. forward, backward: class names of the groups that ran."""

    outputs: list[torch.Tensor]
    saved: list[tuple[Optional[torch.Tensor], ...]]
    grads: list[Optional[torch.Tensor]]
    forward: list[str]
    backward: list[str]


@dataclasses.dataclass
class Case:
    """Operations with values for all of their tensors. needs: whether the input, the parameters, the extra inputs need gradients."""

    ops: Sequence[FusibleOperation]
    recipe: Optional[Recipe]
    shape: tuple[int, ...]
    extra_shape: tuple[int, ...] = ()
    needs: tuple[bool, bool, bool] = (True, True, True)
    device: str = "cpu"

    def __post_init__(self) -> None:
        self.dtype = torch.float32 if self.recipe is None else torch.bfloat16
        generator = torch.Generator().manual_seed(3)

        def draw(shape: Sequence[int]) -> torch.Tensor:
            """-1, 0 and 1: every format holds them exactly, and bf16 the sums of the first product."""
            return torch.randint(-1, 2, tuple(shape), generator=generator).to(self.device, self.dtype)

        self.basics: tuple[BasicOperation, ...] = OperationFuser(self.ops, recipe=self.recipe).basic_ops
        self.input = draw(self.shape)
        self.params = [tuple(draw(p.shape) for p in op.parameters()) for op in self.basics]
        self.extras = [tuple(draw(self.extra_shape) for _ in range(op.num_extra_inputs)) for op in self.basics]

    def call(self) -> Call:
        of_input, of_params, of_extras = self.needs
        flags = [of_input]
        flags += [of_params for tensors in self.params for _ in tensors]
        flags += [of_extras for tensors in self.extras for _ in tensors]
        return Call.of(self.basics, flags, training=True)

    def run(self, *, fused_forward: bool, fused_backward: bool) -> Results:
        """The case run with the forward and the backward lists as asked."""
        call = self.call()
        fused = {on: OperationFuser(self.basics, recipe=self.recipe, fusions=on) for on in (False, True)}
        first = first_needing_grad(call)
        forward, backward = fused[fused_forward].fuse(first).forward, fused[fused_backward].fuse(first).backward
        with torch.no_grad():
            output, extra, ctxs = run_forward(forward, call, self.input, self.params, self.extras)
            grads = [tuple(_like(t, 7) for t in tensors) for tensors in extra]
            grad, of_params, of_extras = run_backward(backward, call, ctxs, _like(output, 5), grads)
        return Results(
            [output, *(t for tensors in extra for t in tensors)],
            [ctx.saved_tensors for ctx in ctxs],
            [grad, *(g for gs in of_params for g in gs), *(g for gs in of_extras for g in gs)],
            [type(group.op).__name__ for group in forward],
            [type(group.op).__name__ for group in backward],
        )


def _like(tensor: torch.Tensor, seed: int) -> torch.Tensor:
    return torch.randint(-1, 2, tensor.shape, generator=torch.Generator().manual_seed(seed)).to(tensor)


def assert_same_bits(one: Sequence[Optional[torch.Tensor]], other: Sequence[Optional[torch.Tensor]]) -> None:
    """Low-precision tensors and their scales, byte by byte."""
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        assert a is not None and b is not None
        assert a.dtype == b.dtype and a.shape == b.shape
        assert torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def assert_agree(one: Results, other: Results, tolerance: dict[str, float]) -> None:
    """Outputs and gradients: the same ones exist, of the same dtypes, with values within the tolerance."""
    for a, b in zip(one.outputs + one.grads, other.outputs + other.grads, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            assert a.dtype == b.dtype
            torch.testing.assert_close(a, b, **tolerance)


def is_quantized(tensor: Optional[torch.Tensor]) -> bool:
    """Whether a saved tensor is a quantized tensor's data."""
    return tensor is not None and (tensor.dtype == torch.uint8 or tensor.dtype.itemsize == 1)


def all_four(case: Case, tolerance: dict[str, float]) -> tuple[Results, Results]:
    """Every fused or unfused forward with every fused or unfused backward; gives (unfused, fused) of both.

    Asserts that what backward reads is the same: the same tensors by number, dtype and shape, quantized ones bit by bit.
    """
    runs = {(f, b): case.run(fused_forward=f, fused_backward=b) for f in (False, True) for b in (False, True)}
    unfused = runs[False, False]
    for run in runs.values():
        assert_agree(run, unfused, tolerance)
        for mine, theirs in zip(run.saved, unfused.saved, strict=True):
            assert [(t.dtype, t.shape) for t in mine] == [(t.dtype, t.shape) for t in theirs]
    for mine, theirs in zip(runs[True, False].saved, unfused.saved, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            if is_quantized(a):
                assert_same_bits([a], [b])
    return unfused, runs[True, True]


class ForwardPair(FusedOperation):
    """Two operations one after another, forward only."""

    def fuser_forward_compute(self, input, params, extra_inputs, *, requires_grad, **keywords):  # type: ignore[no-untyped-def]
        saved = []
        for op, p, needs in zip(self.ops, params, requires_grad, strict=True):
            input, to_save = op.op_forward_compute(input, p, requires_grad=needs, **keywords)
            saved.append(to_save)
        return input, [()] * len(self.ops), saved

    def fuser_forward_save_ctx(self, ctxs, tensors_to_save):  # type: ignore[no-untyped-def]
        for op, ctx, saved in zip(self.ops, ctxs, tensors_to_save, strict=True):
            op.op_forward_save_ctx(ctx, saved)
