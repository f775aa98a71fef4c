"""The classes that operations are made of.

An operation is a value: a frozen dataclass of settings, quantizers and a recipe, never of tensors or modules, so that graphs carry it
as a constant. Its parameters are arguments. Defining a class makes it a dataclass, checks it (checks.py) and registers its `te::`
operation (define.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Optional

import torch

from te_dynamo.operations import types
from te_dynamo.operations.checks import check_definition, halves, uses_split_forward
from te_dynamo.operations.context import OperationContext, RequiresGrad
from te_dynamo.operations.value import Value
from te_dynamo.quantized.quantizers import Quantizer
from te_dynamo.quantized.tensor_proto import TensorProto
from te_dynamo.recipe import Recipe


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One parameter of an operation: its name, its shape, and what fills it in place (the tensor is the only argument)."""

    name: str
    shape: tuple[int, ...]
    init: Callable[[torch.Tensor], Any]


DEFINED: list[type[FusibleOperation]] = []
"""Classes that are to be registered as `te::` operations."""

ON_DEFINITION: list[Callable[[], None]] = []
"""Called when a class has been added: define.py registers it, and takes it out."""


class FusibleOperation(Value):
    """Base of both kinds of operation: values (value.py), equal when their classes and fields are.

    opaque: under the compiler the operation stays one node of its own class until lowering, instead of its parts.
    forward_overload, backward_overload: the class's `te::` operations. forward_node, backward_node: what calls them (define.py).
    """

    opaque: ClassVar[bool] = False
    has_forward: ClassVar[bool] = True
    has_backward: ClassVar[bool] = True
    _use_split_forward: ClassVar[bool] = True

    forward_overload: ClassVar[torch._ops.OpOverload]
    backward_overload: ClassVar[torch._ops.OpOverload]
    forward_node: ClassVar[Callable[..., types.FuserForward]]
    backward_node: ClassVar[Callable[..., types.FuserBackward]]

    def __init_subclass__(cls, abstract: bool = False, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if not abstract:
            if not issubclass(cls, (BasicOperation, FusedOperation)):
                raise TypeError(f"{cls.__qualname__}: an operation is a BasicOperation or a FusedOperation")
            framework = (object, FusibleOperation, BasicOperation, FusedOperation)
            check_definition(cls, "basic" if issubclass(cls, BasicOperation) else "fused", framework)
            cls._use_split_forward = uses_split_forward(cls, framework)
            cls.has_forward, cls.has_backward = halves(cls, framework)
            if cls._use_split_forward:
                DEFINED.append(cls)
                for defined in ON_DEFINITION:
                    defined()

    @property
    def basic_ops(self) -> tuple[BasicOperation, ...]:
        """The basic operations that it stands for, in order."""
        raise NotImplementedError

    # The interface that the fuser's groups run. One entry a basic operation in every list and tuple.

    def fuser_forward_compute(
        self,
        input: torch.Tensor,
        params: Sequence[types.Params],
        extra_inputs: Sequence[types.Params],
        *,
        requires_grad: Sequence[RequiresGrad],
        **keywords: Any,
    ) -> types.FuserForward:
        """(output, extra outputs, tensors to save), the last two a list with an entry for each basic operation. Pure."""
        raise NotImplementedError

    def fuser_forward_save_ctx(self, ctxs: Sequence[OperationContext], tensors_to_save: Sequence[types.Saved]) -> None:
        """Keeps what backward needs: ctx.save_for_backward of what compute returned. Runs once, on fake tensors when compiled."""
        raise NotImplementedError

    def fuser_forward_fake(
        self,
        input: TensorProto,
        params: Sequence[types.Protos],
        extra_inputs: Sequence[types.Protos],
        *,
        requires_grad: Sequence[RequiresGrad],
        **keywords: Any,
    ) -> types.FuserFake:
        """What compute returns, in protos: a tensor that is an input, a parameter or another result is that tensor's own proto."""
        raise NotImplementedError

    def fuser_backward(
        self, ctxs: Sequence[OperationContext], grad_output: torch.Tensor, grad_extra_outputs: Sequence[types.Grads]
    ) -> types.FuserBackward:
        """(grad of the input, grads of the parameters, grads of the extra inputs), an entry for each basic operation."""
        raise NotImplementedError


class BasicOperation(FusibleOperation, abstract=True):
    """One operation: what the fuser's lists start from.

    Without extra inputs or outputs a class defines op_forward_compute, op_forward_save_ctx, op_forward_fake and op_backward (or, in
    the legacy API, op_forward and op_backward); with them the same methods of FusibleOperation, named fuser_*, whose lists then have
    one entry.

    The keyword arguments of every forward method: requires_grad (RequiresGrad; of fuser_* a sequence of one), training,
    prev_op_grad_output_quantizer, next_op_input_quantizer. A method that reads few of them takes **_.

    num_extra_inputs, num_extra_outputs: tensors beside the main one that it takes, and gives.
    """

    num_extra_inputs: ClassVar[int] = 0
    num_extra_outputs: ClassVar[int] = 0

    @property
    def basic_ops(self) -> tuple[BasicOperation, ...]:
        return (self,)

    def parameters(self) -> tuple[Parameter, ...]:
        """Its parameters, in the order in which `params` holds their values."""
        return ()

    def with_recipe(self, recipe: Optional[Recipe]) -> BasicOperation:
        """The operation in a Sequential of that recipe; itself where it has one of its own, or needs none."""
        return self

    def check_input(self, input: TensorProto) -> None:
        """Raises InputError for an input that the operation cannot take. Asked in every call, before anything runs."""

    def input_quantizer(self) -> Optional[Quantizer]:
        """How it holds its input: what the operation before may give it directly."""
        return None

    def grad_output_quantizer(self) -> Optional[Quantizer]:
        """How it holds the gradient of its output: what the operation after may give it directly."""
        return None

    def op_forward_compute(
        self, input: torch.Tensor, params: types.Params, *, requires_grad: RequiresGrad, training: bool, **keywords: Any
    ) -> types.Forward:
        """(output, tensors to save). Pure: reads its arguments and the fields, changes nothing."""
        raise NotImplementedError

    def op_forward_save_ctx(self, ctx: OperationContext, tensors_to_save: types.Saved) -> None:
        """ctx.save_for_backward of what backward needs of them. Runs once, on fake tensors when compiled."""
        raise NotImplementedError

    def op_forward_fake(
        self, input: TensorProto, params: types.Protos, *, requires_grad: RequiresGrad, training: bool, **keywords: Any
    ) -> types.Fake:
        """(output, tensors to save) in protos; a tensor that is the input, a parameter or another result is its own proto."""
        raise NotImplementedError

    def op_forward(self, ctx: Any, input: torch.Tensor, params: types.Params, **keywords: Any) -> torch.Tensor:
        """The legacy API: the output; whatever backward needs is put on ctx."""
        raise NotImplementedError

    def op_backward(self, ctx: OperationContext, grad_output: torch.Tensor) -> types.Backward:
        """(grad of the input, grads of the parameters); None for one that ctx.requires_grad does not ask for."""
        raise NotImplementedError

    def fuser_forward_compute(self, input, params, extra_inputs, *, requires_grad, **keywords):  # type: ignore[no-untyped-def]
        output, saved = self.op_forward_compute(input, params[0], requires_grad=requires_grad[0], **keywords)
        return output, [()], [saved]

    def fuser_forward_save_ctx(self, ctxs: Sequence[OperationContext], tensors_to_save: Sequence[types.Saved]) -> None:
        self.op_forward_save_ctx(ctxs[0], tensors_to_save[0])

    def fuser_forward_fake(self, input, params, extra_inputs, *, requires_grad, **keywords):  # type: ignore[no-untyped-def]
        self.check_input(input)
        output, saved = self.op_forward_fake(input, params[0], requires_grad=requires_grad[0], **keywords)
        return output, [()], [saved]

    def fuser_forward(self, ctxs, input, params, extra_inputs, *, requires_grad, **keywords):  # type: ignore[no-untyped-def]
        """The legacy API with extra inputs or outputs: (output, extra outputs)."""
        return self.op_forward(ctxs[0], input, params[0], requires_grad=requires_grad[0], **keywords), [()]

    def fuser_backward(self, ctxs, grad_output, grad_extra_outputs):  # type: ignore[no-untyped-def]
        grad_input, grad_params = self.op_backward(ctxs[0], grad_output)
        return grad_input, [grad_params], [()]


class FusedOperation(FusibleOperation, abstract=True):
    """Several basic operations in one: what a fusion puts in their place.

    ops: the basic operations, in order; TypeError for anything else, a fused operation too.

    It defines a forward (fuser_forward_compute and fuser_forward_save_ctx), a backward (fuser_backward) or both. A forward alone
    saves, for each basic operation, what that operation's own backward reads, so its fake is the unfused one; a backward alone
    reads what they saved. Only a joint fused op, which defines both, may save what it likes, and then needs fuser_forward_fake.
    """

    ops: tuple[BasicOperation, ...]

    def __post_init__(self) -> None:
        if not self.ops:
            raise TypeError(f"{type(self).__qualname__}: a fused operation of no operations")
        for op in self.ops:
            if not isinstance(op, BasicOperation):
                raise TypeError(f"{type(self).__qualname__}: a fused operation is made of basic ones, got {op!r}")
            if self._use_split_forward and not op._use_split_forward:
                raise TypeError(
                    f"{type(self).__qualname__}: {type(op).__qualname__} has the legacy op_forward, which a split forward cannot replace"
                )
        super().__post_init__()

    @property
    def basic_ops(self) -> tuple[BasicOperation, ...]:
        return self.ops

    def fuser_forward(self, ctxs, input, params, extra_inputs, **keywords):  # type: ignore[no-untyped-def]
        """The legacy API: (output, extra outputs an entry for each basic operation)."""
        raise NotImplementedError

    def fuser_forward_fake(self, input, params, extra_inputs, *, requires_grad, **keywords):  # type: ignore[no-untyped-def]
        outputs, saved = [], []
        for i, op in enumerate(self.ops):
            input, extra_outputs, to_save = op.fuser_forward_fake(
                input, params[i : i + 1], extra_inputs[i : i + 1], requires_grad=requires_grad[i : i + 1], **keywords
            )
            outputs += extra_outputs
            saved += to_save
        return input, outputs, saved
