"""Every class of operations as `te::` operations, registered when the class is defined.

    te::<Class>(Tensor input, Tensor[] params, Tensor[] extra_inputs, FusibleOperation op, Call call) -> Tensor[]
        [output, *extra outputs, *what backward saves]
    te::<Class>_backward(Tensor grad_output, Tensor?[] grad_extra_outputs, Tensor?[] saved, int[] sizes, FusibleOperation op,
                         Call call, Layout layout) -> Tensor[]
        the gradients that call.requires_grad asks for: of the input, the parameters, the extra inputs

The fake of the first is made of the operation's own protos, that of the second of what forward read. The compiler sees both as their
parts, unless the class is `opaque`: then they stay nodes until lowering.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Any, Optional

import torch

from te_dynamo.dialect.define import REFERENCE_ONLY, expand_in_compiler, te_op
from te_dynamo.dialect.fakes import of_proto
from te_dynamo.errors import OperationError
from te_dynamo.operations import types
from te_dynamo.operations.context import OperationContext
from te_dynamo.operations.fuser import Group, grouped
from te_dynamo.operations.op import DEFINED, ON_DEFINITION, FusibleOperation
from te_dynamo.operations.program import Program, gradients, split_tensors, unaliased
from te_dynamo.operations.run import Call, contexts, run_backward
from te_dynamo.operations.value import Value
from te_dynamo.quantized.tensor_proto import TensorProto


class Layout(Value):
    """How the flat lists of a backward are to be read.

    saved: tensors that each basic operation saved. ranks, dtypes: of the input, the parameters and the extra inputs.
    """

    saved: tuple[int, ...]
    ranks: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]


OVERLOADS: set[torch._ops.OpOverload] = set()
"""The operations of all classes."""

_defined: dict[str, str] = {}


def _register(cls: type[FusibleOperation]) -> None:
    """Defines the operations of `cls`, or anew those of a class that is defined again. TypeError for a name that another has."""
    name, where = cls.__name__, f"{cls.__module__}.{cls.__qualname__}"
    if _defined.setdefault(name, where) != where:
        raise TypeError(
            f"{where}: te::{name} is the operation of {_defined[name]} already; give the class another name"
        )
    overloads: list[tuple[torch._ops.OpOverload, Any]] = []
    if cls.has_forward:
        cls.forward_overload, cls.forward_node = _define_forward(name), _forward_node
        overloads.append((cls.forward_overload, _expand_forward))
    if cls.has_backward:
        cls.backward_overload, cls.backward_node = _define_backward(name), _backward_node
        overloads.append((cls.backward_overload, _expand_backward))
    for overload, expansion in overloads:
        OVERLOADS.add(overload)
        if cls.opaque:
            REFERENCE_ONLY.discard(
                overload
            )  # lowering traces it where there are kernels, and leaves it a call elsewhere
        else:
            expand_in_compiler(overload, expansion)


# Forward.


def _program(op: FusibleOperation, call: Call) -> Program:
    group = (Group(op, 0),)
    backward = group if op.has_backward else grouped(op.basic_ops)
    return Program(call, group, backward, parts=True)


def _expand_forward(input: Any, params: Any, extra_inputs: Any, op: FusibleOperation, call: Call) -> Any:
    return _program(op, call).expand(input, params, extra_inputs)


def _run_forward(input: Any, params: Any, extra_inputs: Any, op: FusibleOperation, call: Call) -> Any:
    return _program(op, call).run(input, params, extra_inputs)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
    input, params, extra_inputs, op, call = inputs
    _program(op, call).setup_context(ctx, input, params, extra_inputs, output)


def _backward(ctx: Any, grads: list[Optional[torch.Tensor]]) -> tuple[Any, ...]:
    return *gradients(ctx, grads), None, None


def _define_forward(name: str) -> torch._ops.OpOverload:
    def fake(
        input: torch.Tensor,
        params: list[torch.Tensor],
        extra_inputs: list[torch.Tensor],
        op: FusibleOperation,
        call: Call,
    ) -> list[torch.Tensor]:
        return _program(op, call).fake(input, params, extra_inputs)

    fake.__name__ = name
    return te_op(reference=_run_forward, setup_context=_setup_context, backward=_backward)(fake)


def _forward_node(
    op: FusibleOperation,
    call: Call,
    input: torch.Tensor,
    params: Sequence[types.Params],
    extra_inputs: Sequence[types.Params],
) -> types.FuserForward:
    """What `fuser_forward_compute` returns, by one call of the class's own `te::` operation."""
    flat = [*chain.from_iterable(params)], [*chain.from_iterable(extra_inputs)]
    results = op.forward_overload(input, *flat, op, call)
    saved = _program(op, call).protos(input, *flat).resolve([input, *flat[0], *flat[1]], results)
    rest = iter(results[1:])
    extra_outputs = [tuple(next(rest) for _ in range(basic.num_extra_outputs)) for basic in op.basic_ops]
    return results[0], extra_outputs, saved


# Backward.


def _run_backward(
    grad_output: Any, grad_extra_outputs: Any, saved: Any, sizes: Any, op: Any, call: Call, layout: Layout
) -> list[torch.Tensor]:
    grads = _expand_backward(grad_output, grad_extra_outputs, saved, sizes, op, call, layout)
    return unaliased([t for t in (grad_output, *grad_extra_outputs, *saved) if t is not None], grads)


def _expand_backward(
    grad_output: torch.Tensor,
    grad_extra_outputs: Sequence[Optional[torch.Tensor]],
    saved: Sequence[Optional[torch.Tensor]],
    sizes: Sequence[int],
    op: FusibleOperation,
    call: Call,
    layout: Layout,
) -> list[torch.Tensor]:
    protos = _protos(sizes, layout, grad_output.device)
    count = sum(len(basic.parameters()) for basic in op.basic_ops)
    params, extra_inputs = split_tensors(op.basic_ops, protos[1 : 1 + count], protos[1 + count :])
    made = contexts(Group(op, 0), call, protos[0], params, extra_inputs)
    given = iter(saved)
    ctxs = [ctx.with_saved([next(given) for _ in range(n)]) for ctx, n in zip(made, layout.saved, strict=True)]
    rest = iter(grad_extra_outputs)
    extras = [tuple(next(rest) for _ in range(basic.num_extra_outputs)) for basic in op.basic_ops]
    grad, of_params, of_extras = run_backward((Group(op, 0),), call, ctxs, grad_output, extras, parts=True)
    grads = [grad, *chain.from_iterable(of_params), *chain.from_iterable(of_extras)]
    asked = [g for g, needed in zip(grads, call.flags(), strict=True) if needed]
    if any(g is None for g in asked):
        raise OperationError(f"{type(op).__qualname__}: its backward gives no gradient for a tensor that requires one")
    return [g for g in asked if g is not None]


def _protos(sizes: Sequence[int], layout: Layout, device: torch.device) -> list[TensorProto]:
    """What forward read: input, parameters, extra inputs."""
    given = iter(sizes)
    shapes = [tuple(next(given) for _ in range(rank)) for rank in layout.ranks]
    return [TensorProto(shape, dtype, device=device) for shape, dtype in zip(shapes, layout.dtypes, strict=True)]


def _define_backward(name: str) -> torch._ops.OpOverload:
    def fake(
        grad_output: torch.Tensor,
        grad_extra_outputs: list[Optional[torch.Tensor]],
        saved: list[Optional[torch.Tensor]],
        sizes: list[int],
        op: FusibleOperation,
        call: Call,
        layout: Layout,
    ) -> list[torch.Tensor]:
        protos = _protos(sizes, layout, grad_output.device)
        return [of_proto(proto) for proto, needed in zip(protos, call.flags(), strict=True) if needed]

    fake.__name__ = f"{name}_backward"
    return te_op(reference=_run_backward)(fake)


def _backward_node(
    op: FusibleOperation,
    call: Call,
    ctxs: Sequence[OperationContext],
    grad_output: torch.Tensor,
    grad_extra_outputs: Sequence[types.Grads],
) -> types.FuserBackward:
    """What `fuser_backward` returns, by one call of the class's own `te::` operation."""
    protos = [
        ctxs[0].input,
        *chain.from_iterable(c.params for c in ctxs),
        *chain.from_iterable(c.extra_inputs for c in ctxs),
    ]
    layout = Layout(
        tuple(len(ctx.saved_tensors) for ctx in ctxs),
        tuple(len(proto.shape) for proto in protos),
        tuple(proto.dtype for proto in protos),
    )
    results = op.backward_overload(
        grad_output,
        [*chain.from_iterable(grad_extra_outputs)],
        [*chain.from_iterable(ctx.saved_tensors for ctx in ctxs)],
        [*chain.from_iterable(proto.shape for proto in protos)],
        op,
        call,
        layout,
    )
    given = iter(results)
    grads = [next(given) if needed else None for needed in call.flags()]
    count = sum(len(ctx.params) for ctx in ctxs)
    return grads[0], *split_tensors(op.basic_ops, grads[1 : 1 + count], grads[1 + count :])


def _register_defined() -> None:
    while DEFINED:
        _register(DEFINED.pop(0))


_register_defined()
ON_DEFINITION.append(_register_defined)
