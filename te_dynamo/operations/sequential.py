"""`te_dynamo.Sequential`: a module that owns the parameters of a list of operations and runs what the fuser makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, Optional

import torch

from te_dynamo.errors import InputError, InvalidOptionError, UnsupportedError
from te_dynamo.fusion_registry import operation_fusions_digest
from te_dynamo.operations.autograd import is_autocast_on, keep
from te_dynamo.operations.checks import SPLIT
from te_dynamo.operations.fuser import OperationFuser
from te_dynamo.operations.op import BasicOperation, FusibleOperation
from te_dynamo.operations.program import Program, gradients, split_tensors
from te_dynamo.operations.run import run_forward
from te_dynamo.operations.sequence import OperationSequence, sequence
from te_dynamo.recipe import Recipe, as_recipe


class _Parameters(torch.nn.Module):
    """The parameters of one operation, which `repr` shows."""

    def __init__(self, described: str) -> None:
        super().__init__()
        self.described = described

    def __repr__(self) -> str:
        return self.described


class Sequential(torch.nn.Module):
    """Operations one after another, with their parameters.

    ops: the operations; a fused one counts as its basic operations. recipe: that of the operations without one of their own, by name
    or as an object, None for high precision. fusions: False runs every operation by itself. device, dtype: of the parameters.

    `seq(x, *extra_inputs)` gives y, or (y, *extra_outputs) where an operation makes one. Parameters are called "0.weight" after the
    position of their operation. One autograd node stands for all of it. Everything is computed in the dtype of x, a floating one, also where
    parameters have another and under autocast.
    """

    def __init__(
        self,
        *ops: FusibleOperation,
        recipe: Optional[Recipe | str] = None,
        fusions: bool = True,
        device: Optional[torch.device | str] = None,
        dtype: Optional[torch.dtype] = None,
    ) -> None:
        super().__init__()
        if not isinstance(fusions, bool):
            raise InvalidOptionError(f"Sequential: fusions is True or False, got {fusions!r}")
        recipe = as_recipe(recipe)
        basic_ops = OperationFuser(ops, recipe=recipe).basic_ops
        self.sequence = OperationSequence(basic_ops, recipe, fusions)
        self._extra_inputs = [type(op).__name__ for op in basic_ops for _ in range(op.num_extra_inputs)]
        self._num_extra_outputs = sum(op.num_extra_outputs for op in basic_ops)
        legacy = [f"{i}: {type(op).__name__}" for i, op in enumerate(basic_ops) if not op._use_split_forward]
        self._legacy = _cannot_be_traced(legacy, "op") if legacy else ""
        self._names: list[tuple[str, str]] = []
        for i, op in enumerate(basic_ops):
            holder = _Parameters(op.describe())
            for parameter in op.parameters():
                value = torch.empty(parameter.shape, device=device, dtype=dtype)
                with torch.no_grad():
                    parameter.init(value)
                holder.register_parameter(parameter.name, torch.nn.Parameter(value))
                self._names.append((str(i), parameter.name))
            self.add_module(str(i), holder)

    @property
    def ops(self) -> tuple[BasicOperation, ...]:
        """The basic operations."""
        return self.sequence.ops

    def forward(self, input: torch.Tensor, *extra_inputs: torch.Tensor) -> Any:
        if len(extra_inputs) != len(self._extra_inputs):
            raise InputError(
                f"Sequential: expected {len(self._extra_inputs)} extra inputs ({', '.join(self._extra_inputs) or 'none'}), "
                f"got {len(extra_inputs)}"
            )
        _check_tensor(input)
        if not input.dtype.is_floating_point:
            raise InputError(
                f"Sequential: expected an input of floating dtype, got {input.dtype}: operations compute in the input's dtype. "
                "Cast it, or embed indices, before the call"
            )
        if is_autocast_on(input.device):
            with torch.autocast(input.device.type, enabled=False):
                results = self._results(input, extra_inputs)
        else:
            results = self._results(input, extra_inputs)
        return results[0] if len(results) == 1 else tuple(results)

    def _results(self, input: torch.Tensor, extra_inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """(output, *extra outputs)."""
        params = [getattr(getattr(self, child), name) for child, name in self._names]
        for tensor in (*params, *extra_inputs):  # parameters first: Dynamo's graph takes its inputs in this order
            _check_tensor(tensor)
        grad = torch.is_grad_enabled()
        # Read here, once: what is saved follows from it in real and in fake runs.
        requires_grad = [grad and tensor.requires_grad for tensor in (input, *params, *extra_inputs)]
        if self._legacy or not torch.compiler.is_compiling():
            if self._legacy:
                torch._dynamo.graph_break(msg=self._legacy)
            return _run(self.sequence, requires_grad, self.training, input, *params, *extra_inputs)
        fusions = operation_fusions_digest()
        legacy = _legacy_fused(self.sequence, tuple(requires_grad), self.training, fusions)
        if legacy:
            torch._dynamo.graph_break(msg=legacy)
            return _run(self.sequence, requires_grad, self.training, input, *params, *extra_inputs)
        results = sequence(input, params, list(extra_inputs), self.sequence, requires_grad, self.training, fusions)
        return results[: 1 + self._num_extra_outputs]  # type: ignore[no-any-return]


def _check_tensor(value: object) -> None:
    if not isinstance(value, torch.Tensor):
        raise InputError(f"Sequential: expected tensors as its input and extra inputs, got a {type(value).__name__}")


@torch.compiler.assume_constant_result
def _legacy_fused(sequence: OperationSequence, requires_grad: tuple[bool, ...], training: bool, fusions: str) -> str:
    """Why what registered fusions make of the list cannot be traced, "" where it can. Dynamo asks while it traces."""
    program = sequence.fake_program(requires_grad, training)
    names = [type(group.op).__name__ for group in program.forward if not group.op._use_split_forward]
    return _cannot_be_traced(names, "fuser") if names else ""


def _cannot_be_traced(names: Sequence[str], api: str) -> str:
    methods = [f"{api}_{method}" for method in SPLIT]
    return (
        f"te_dynamo.Sequential: {', '.join(names)} has the legacy {api}_forward, which cannot be traced; give it "
        f"{', '.join(methods[:-1])} and {methods[-1]}"
    )


@torch.compiler.disable(reason="te_dynamo.Sequential with an operation of the legacy API: op_forward cannot be traced")
def _run(
    sequence: OperationSequence, requires_grad: list[bool], training: bool, *tensors: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    if torch._C._are_functorch_transforms_active():
        raise UnsupportedError(
            "Sequential: inside a torch.func transform (grad, vmap, jvp, ...), which its operations do not support; call it outside, "
            "or build that part of torch's own modules"
        )
    return _Run.apply(sequence.program(requires_grad, training), *tensors)  # type: ignore[no-any-return]


class _Run(torch.autograd.Function):
    """All operations of one eager call, also those with the legacy API."""

    @staticmethod
    def forward(func_ctx: Any, program: Program, input: torch.Tensor, *tensors: torch.Tensor) -> Any:  # type: ignore[override]
        call = program.call
        count = sum(len(op.parameters()) for op in call.ops)
        params, extra_inputs = split_tensors(call.ops, tensors[:count], tensors[count:])
        output, extra_outputs, ctxs = run_forward(program.forward, call, input, params, extra_inputs)
        keep(func_ctx, call, program.backward, ctxs, output)
        results = (output, *chain.from_iterable(extra_outputs))
        # No result is another: autograd would give a tensor that is two results one gradient, and a write to one would be to both.
        twice = (r is not None and any(r is other for other in results[:i]) for i, r in enumerate(results))
        return tuple(r.clone() if again else r for r, again in zip(results, twice, strict=True))

    @staticmethod
    def backward(func_ctx: Any, *grads: Any) -> Any:
        grad, params, extra_inputs = gradients(func_ctx, grads)
        return None, grad, *params, *extra_inputs
