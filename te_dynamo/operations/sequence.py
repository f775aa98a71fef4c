"""`te.sequence`: a list of operations as one node of a graph, so that a Sequential traces whole under any compiler.

    te::sequence(Tensor input, Tensor[] params, Tensor[] extra_inputs, OperationSequence sequence, bool[] requires_grad, bool training,
                 str fusions) -> Tensor[]                    # [output, *extra outputs, *what backward saves]

The node says which operations there are; running it fuses them. Below autograd AOTAutograd sees what the operations are made of
(te.quantize, te.gemm, aten), so that the graph's own fusions and Inductor's apply inside.
"""

import functools
from collections.abc import Sequence
from typing import Any, Optional

import torch

from te_dynamo.dialect.define import expand_in_compiler, te_op
from te_dynamo.errors import TeError
from te_dynamo.fusion_registry import operation_fusions
from te_dynamo.operations.fuser import OperationFuser
from te_dynamo.operations.op import BasicOperation
from te_dynamo.operations.program import Program, gradients
from te_dynamo.operations.run import Call, first_needing_grad
from te_dynamo.operations.value import Value
from te_dynamo.recipe import Recipe


class OperationSequence(Value):
    """What a Sequential runs, without its parameters.

    ops: basic operations. recipe: what fusions are told. fusions: whether they run. shipped: False runs the registered ones alone.
    """

    ops: tuple[BasicOperation, ...]
    recipe: Optional[Recipe] = None
    fusions: bool = True
    shipped: bool = True

    def program(self, requires_grad: Sequence[bool], training: bool) -> Program:
        """requires_grad: of the input, then of every parameter, then of every extra input."""
        return _program(self, tuple(requires_grad), training, operation_fusions())

    def fake_program(self, requires_grad: Sequence[bool], training: bool) -> Program:
        """The same for fake runs and after a real one. A wrong fusion is not its error but that of running or compiling, which options may prevent."""
        try:
            return self.program(requires_grad, training)
        except TeError:
            return OperationSequence(self.ops, self.recipe, fusions=False).program(requires_grad, training)


@functools.lru_cache(maxsize=1024)
def _program(sequence: OperationSequence, requires_grad: tuple[bool, ...], training: bool, fusions: Any) -> Program:
    call = Call.of(sequence.ops, requires_grad, training)
    fuser = OperationFuser(sequence.ops, recipe=sequence.recipe, fusions=sequence.fusions, shipped=sequence.shipped)
    fused = fuser.fuse(first_needing_grad(call))
    return Program(call, fused.forward, fused.backward)


def _run(input: Any, params: Any, extra_inputs: Any, sequence: Any, requires_grad: Any, training: Any, _: Any) -> Any:
    return sequence.program(requires_grad, training).run(input, params, extra_inputs)


def _expand(
    input: Any, params: Any, extra_inputs: Any, sequence: Any, requires_grad: Any, training: Any, _: Any
) -> Any:
    return sequence.program(requires_grad, training).expand(input, params, extra_inputs)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
    input, params, extra_inputs, sequence, requires_grad, training, _ = inputs
    sequence.fake_program(requires_grad, training).setup_context(ctx, input, params, extra_inputs, output)


def _backward(ctx: Any, grads: list[Optional[torch.Tensor]]) -> tuple[Any, ...]:
    return *gradients(ctx, grads), None, None, None, None


@te_op(reference=_run, setup_context=_setup_context, backward=_backward)
def sequence(
    input: torch.Tensor,
    params: list[torch.Tensor],
    extra_inputs: list[torch.Tensor],
    sequence: OperationSequence,
    requires_grad: list[bool],
    training: bool,
    fusions: str,
) -> list[torch.Tensor]:
    """[output, *extra outputs, *saved] of a sequence of operations.

    requires_grad: of the input, the parameters, the extra inputs: decides what is saved. fusions: the digest of the registered
    fusions, which makes a graph with others another graph.
    """
    return sequence.fake_program(requires_grad, training).fake(input, params, extra_inputs)


expand_in_compiler(sequence, _expand)
