"""Running the fuser's groups: forward, what is kept, backward. Every number of results is checked, errors name the operation."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, Optional

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from te_dynamo.errors import InputError, OperationError, UnsupportedError
from te_dynamo.operations import types
from te_dynamo.operations.context import LegacyContext, OperationContext, RequiresGrad
from te_dynamo.operations.fuser import Group
from te_dynamo.operations.op import BasicOperation, FusibleOperation
from te_dynamo.operations.value import Value
from te_dynamo.quantized.quantizers import Quantizer
from te_dynamo.quantized.tensor_proto import TensorProto, to_tensor_proto


class Call(Value):
    """What one call of a list of basic operations is told, beside its tensors.

    ops: the basic operations. requires_grad: one entry each, read once. training: the module's mode. before, after: the hints of
    the operations around the list, if any.
    """

    ops: tuple[BasicOperation, ...]
    requires_grad: tuple[RequiresGrad, ...]
    training: bool
    before: Optional[Quantizer] = None
    after: Optional[Quantizer] = None

    @classmethod
    def of(cls, ops: Sequence[BasicOperation], flags: Sequence[bool], training: bool) -> Call:
        """flags: of the input, then of every parameter, then of every extra input, in the order of the operations."""
        expected = 1 + sum(len(op.parameters()) + op.num_extra_inputs for op in ops)
        if len(flags) != expected:
            raise InputError(
                f"{len(ops)} operations: expected {expected} values of requires_grad, of the input, of every parameter and of every "
                f"extra input; got {len(flags)}"
            )
        before, *rest = flags
        given = iter(rest)
        params = [tuple(next(given) for _ in op.parameters()) for op in ops]
        extras = [tuple(next(given) for _ in range(op.num_extra_inputs)) for op in ops]
        requires_grad = []
        for of_params, of_extras in zip(params, extras, strict=True):
            requires_grad.append(RequiresGrad(before, of_params, of_extras))
            before = requires_grad[-1].any()
        return cls(tuple(ops), tuple(requires_grad), training)

    def needs_grad(self, group: Group) -> bool:
        """Whether the group's backward will run."""
        return any(self.requires_grad[i].any() for i in group.indices)

    def keywords(self, group: Group) -> dict[str, Any]:
        """The keyword arguments of the group's forward."""
        before, after = group.first - 1, group.indices.stop
        return {
            "requires_grad": tuple(self.requires_grad[i] for i in group.indices),
            "training": self.training,
            "prev_op_grad_output_quantizer": self.ops[before].grad_output_quantizer() if before >= 0 else self.before,
            "next_op_input_quantizer": self.ops[after].input_quantizer() if after < len(self.ops) else self.after,
        }

    def flags(self) -> list[bool]:
        """Which gradients are asked for: of the input, every parameter, every extra input; the argument of `of`."""
        params = chain.from_iterable(needs.params for needs in self.requires_grad)
        extra_inputs = chain.from_iterable(needs.extra_inputs for needs in self.requires_grad)
        return [self.requires_grad[0].input, *params, *extra_inputs]

    def describe(self) -> str:
        """The text in printed graphs: which gradients are asked for."""
        return f"Call(requires_grad={self.flags()}, training={self.training})"

    def of_group(self, group: Group) -> Call:
        """The call of the group alone."""
        keywords = self.keywords(group)
        return Call(group.op.basic_ops, *keywords.values())


def check_params(ops: Sequence[BasicOperation], params: Sequence[Sequence[Any]]) -> None:
    """Raises InputError for a parameter of another shape than its operation's: it would broadcast, and kernels read beyond its end."""
    for op, tensors in zip(ops, params, strict=True):
        for parameter, given in zip(op.parameters(), tensors, strict=True):
            if tuple(given.shape) != parameter.shape:
                shapes = f"expected a {parameter.name} {list(parameter.shape)}, got {list(given.shape)}"
                raise InputError(f"{op.describe()}: {shapes}")


def first_needing_grad(call: Call) -> int:
    """Position of the first basic operation that has a backward to run; their number where none has."""
    return next((i for i, needs in enumerate(call.requires_grad) if needs.any()), len(call.ops))


def compute(
    group: Group,
    call: Call,
    input: torch.Tensor,
    params: Sequence[types.Params],
    extra_inputs: Sequence[types.Params],
    parts: bool = False,
) -> types.FuserForward:
    """The group's forward by the split API, its results' numbers checked; nothing to save where no gradient is needed.

    params, extra_inputs: of all basic operations. parts: run an opaque operation as its parts too, not as its own node.
    """
    if not group.op._use_split_forward:  # a legacy basic operation never gets here: Sequential breaks the graph
        raise UnsupportedError(f"{type(group.op).__qualname__} has the legacy fuser_forward, which cannot be traced")
    mine = slice(group.indices.start, group.indices.stop)
    if group.op.opaque and not parts:
        return group.op.forward_node(call.of_group(group), input, params[mine], extra_inputs[mine])
    results = group.op.fuser_forward_compute(input, params[mine], extra_inputs[mine], **call.keywords(group))
    return _checked(group, call, results)


def fake(
    group: Group, call: Call, input: TensorProto, params: Sequence[types.Protos], extra_inputs: Sequence[types.Protos]
) -> types.FuserFake:
    """What `compute` returns, in protos."""
    mine = slice(group.indices.start, group.indices.stop)
    results = group.op.fuser_forward_fake(input, params[mine], extra_inputs[mine], **call.keywords(group))
    return _checked(group, call, results)


def _checked(group: Group, call: Call, results: Any) -> Any:
    op = group.op
    output, extra_outputs, saved = _of_length(op, "(output, extra outputs, tensors to save)", results, 3)
    _check_extra_outputs(group, extra_outputs)
    _of_length(op, "tensors to save, a list for each basic operation", saved, len(group.indices))
    if not isinstance(output, (torch.Tensor, TensorProto)):
        raise OperationError(f"{type(op).__qualname__}: its output is a {type(output).__name__}, not a tensor")
    if not call.needs_grad(group):
        saved = [[] for _ in group.indices]
    return output, [tuple(tensors) for tensors in extra_outputs], saved


def _check_extra_outputs(group: Group, extra_outputs: Any) -> None:
    _of_length(group.op, "extra outputs, a tuple for each basic operation", extra_outputs, len(group.indices))
    for basic, tensors in zip(group.op.basic_ops, extra_outputs, strict=True):
        _of_length(group.op, f"extra outputs of {type(basic).__name__}", tensors, basic.num_extra_outputs)


def _of_length(op: FusibleOperation, what: str, values: Any, length: int) -> Any:
    if not isinstance(values, (tuple, list)) or len(values) != length:
        found = f"{len(values)}" if isinstance(values, (tuple, list)) else f"a {type(values).__name__}"
        raise OperationError(f"{type(op).__qualname__}: expected {length} {what}, got {found}")
    return values


def contexts(
    group: Group,
    call: Call,
    input: TensorProto,
    params: Sequence[types.Protos],
    extra_inputs: Sequence[types.Protos],
) -> list[OperationContext]:
    """A context for each basic operation of the group, without saved tensors."""
    made: list[OperationContext] = []
    proto: Optional[TensorProto] = input
    cls = OperationContext if group.op._use_split_forward else LegacyContext
    for i, op in zip(group.indices, group.op.basic_ops, strict=True):
        one = Group(op, i)
        keywords = call.keywords(one)
        facts = {**keywords, "requires_grad": call.requires_grad[i]}
        made.append(cls(input=proto, params=params[i], extra_inputs=extra_inputs[i], **facts))
        if proto is not None:
            op.check_input(proto)
        if i + 1 == group.indices.stop:
            break
        # The tensors inside a fused operation exist nowhere: their protos do, up to a legacy operation, which has no fake.
        if proto is not None and op._use_split_forward:
            proto = op.fuser_forward_fake(proto, params[i : i + 1], extra_inputs[i : i + 1], **keywords)[0]
        else:
            proto = None
    return made


def save(group: Group, call: Call, ctxs: Sequence[OperationContext], saved: Sequence[types.Saved]) -> None:
    """The group's save_ctx; nothing where its backward will not run."""
    if call.needs_grad(group):
        group.op.fuser_forward_save_ctx(ctxs, saved)  # type: ignore[arg-type]


def run_forward(
    groups: Sequence[Group],
    call: Call,
    input: torch.Tensor,
    params: Sequence[types.Params],
    extra_inputs: Sequence[types.Params],
) -> tuple[torch.Tensor, list[types.Params], list[OperationContext]]:
    """(output, extra outputs and a context for each basic operation) of all groups, split and legacy, on real tensors."""
    check_params(call.ops, params)
    extra_outputs: list[types.Params] = []
    ctxs: list[OperationContext] = []
    param_protos = [tuple(map(to_tensor_proto, tensors)) for tensors in params]
    extra_protos = [tuple(map(to_tensor_proto, tensors)) for tensors in extra_inputs]
    for group in groups:
        made = contexts(group, call, to_tensor_proto(input), param_protos, extra_protos)
        if group.op._use_split_forward:
            input, extra, saved = compute(group, call, input, params, extra_inputs)
            save(group, call, made, saved)
        else:
            input, extra = _legacy_forward(group, call, made, input, params, extra_inputs)
        extra_outputs += extra
        ctxs += made
    return input, extra_outputs, ctxs


def _legacy_forward(
    group: Group,
    call: Call,
    ctxs: Sequence[OperationContext],
    input: torch.Tensor,
    params: Sequence[types.Params],
    extra_inputs: Sequence[types.Params],
) -> tuple[torch.Tensor, list[types.Params]]:
    mine = slice(group.indices.start, group.indices.stop)
    results = group.op.fuser_forward(ctxs, input, params[mine], extra_inputs[mine], **call.keywords(group))  # type: ignore[attr-defined]
    output, extra_outputs = _of_length(group.op, "(output, extra outputs)", results, 2)
    _check_extra_outputs(group, extra_outputs)
    return output, [tuple(tensors) for tensors in extra_outputs]


def run_backward(
    groups: Sequence[Group],
    call: Call,
    ctxs: Sequence[OperationContext],
    grad_output: torch.Tensor,
    grad_extra_outputs: Sequence[types.Grads],
    parts: bool = False,
) -> types.FuserBackward:
    """(grad of the input, grads of the parameters, grads of the extra inputs), the last two an entry for each basic operation.

    groups: those that need a gradient, in the order of forward; the rest have no backward and their gradients are None.
    parts: as in `compute`.
    """
    grad_params: list[types.Grads] = [(None,) * len(needs.params) for needs in call.requires_grad]
    grad_extras: list[types.Grads] = [(None,) * len(needs.extra_inputs) for needs in call.requires_grad]
    grad: Optional[torch.Tensor] = grad_output
    for group in reversed(groups):
        mine = slice(group.indices.start, group.indices.stop)
        assert grad is not None  # checked below: what runs before needs one
        results = _backward(group, call, ctxs[mine], grad, grad_extra_outputs[mine], parts)
        grad, of_params, of_extras = _of_length(group.op, "(grad input, grads of params, of extra inputs)", results, 3)
        needs = call.requires_grad[mine]
        grad_params[mine] = _checked_grads(group, "parameters", of_params, [n.params for n in needs])
        grad_extras[mine] = _checked_grads(group, "extra inputs", of_extras, [n.extra_inputs for n in needs])
        _check_grad_input(group, grad, ctxs[group.first], needs[0].input)
    reached = bool(groups) and groups[0].first == 0 and call.requires_grad[0].input
    return (grad if reached else None), grad_params, grad_extras


def _backward(
    group: Group,
    call: Call,
    ctxs: Sequence[Any],
    grad: torch.Tensor,
    grad_extra_outputs: Sequence[types.Grads],
    parts: bool,
) -> Any:
    if group.op.opaque and not parts:
        return group.op.backward_node(call.of_group(group), ctxs, grad, grad_extra_outputs)
    return group.op.fuser_backward(ctxs, grad, grad_extra_outputs)


def _check_grad_input(group: Group, grad: Any, ctx: OperationContext, needed: bool) -> None:
    name = type(group.op).__qualname__
    if grad is None and needed:
        raise OperationError(f"{name}: its backward gives no gradient for its input, which requires one")
    proto = getattr(ctx, "input", None)  # none behind a legacy operation
    if grad is not None and proto is not None and needed:
        same = len(grad.shape) == len(proto.shape)
        if not same or any(statically_known_true(a != b) for a, b in zip(grad.shape, proto.shape, strict=True)):
            shapes = f"{list(grad.shape)} for an input {list(proto.shape)}"
            raise OperationError(f"{name}: its backward gives a gradient of the wrong shape, {shapes}")


def _checked_grads(group: Group, of: str, grads: Any, needed: Sequence[tuple[bool, ...]]) -> list[types.Grads]:
    _of_length(group.op, f"grads of {of}, a tuple for each basic operation", grads, len(needed))
    for basic, given, wanted in zip(group.op.basic_ops, grads, needed, strict=True):
        _of_length(group.op, f"grads of the {of} of {type(basic).__name__}", given, len(wanted))
        if any(flag and grad is None for flag, grad in zip(wanted, given, strict=True)):
            raise OperationError(
                f"{type(group.op).__qualname__}: its backward gives no gradient for one of the {of} of {type(basic).__name__}, "
                "which requires one"
            )
    return [tuple(given) for given in grads]
