"""What crosses from an operation's forward to its backward, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional

import torch

from te_dynamo.errors import OperationError
from te_dynamo.operations.value import Value
from te_dynamo.quantized.quantizers import Quantizer
from te_dynamo.quantized.tensor_proto import TensorProto


class RequiresGrad(Value):
    """Which of a basic operation's tensors need a gradient: read once, when the operations are called.

    input: whether anything before the operation needs one. params, extra_inputs: one flag a tensor.
    """

    input: bool = False
    params: tuple[bool, ...] = ()
    extra_inputs: tuple[bool, ...] = ()

    def any(self) -> bool:
        """Whether the operation has a backward to run."""
        return self.input or any(self.params) or any(self.extra_inputs)


class OperationContext:
    """One call of one basic operation, as its backward sees it. All of it is read only but the tensors.

    input, params, extra_inputs: protos of what forward read (shapes and dtypes; a tensor is there only if it was saved).
    requires_grad, training, prev_op_grad_output_quantizer, next_op_input_quantizer: the keyword arguments of forward.
    save_for_backward(*tensors): called once, by save_ctx. saved_tensors: the same tensors, in backward.

    Setting any other attribute raises OperationError: what backward needs is a tensor, one of the keyword arguments or a field of the
    operation, so that real and fake runs cannot disagree on it and a second backward finds what the first found.
    """

    __slots__ = (
        "_saved",
        "extra_inputs",
        "input",
        "next_op_input_quantizer",
        "params",
        "prev_op_grad_output_quantizer",
        "requires_grad",
        "training",
    )

    _saved: tuple[Optional[torch.Tensor], ...]
    input: TensorProto
    params: tuple[TensorProto, ...]
    extra_inputs: tuple[TensorProto, ...]
    requires_grad: RequiresGrad
    training: bool
    prev_op_grad_output_quantizer: Optional[Quantizer]
    next_op_input_quantizer: Optional[Quantizer]

    def __init__(self, **facts: Any) -> None:
        for name, value in {"_saved": (), **facts}.items():
            object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        raise OperationError(
            f"ctx.{name} = ...: nothing but tensors crosses from forward to backward; return a tensor among tensors_to_save, "
            "make a setting a field of the operation, or derive it in backward from ctx.input, ctx.params and ctx.requires_grad"
        )

    def save_for_backward(self, *tensors: Optional[torch.Tensor]) -> None:
        """Keeps tensors (None keeps its place) for backward, among those that forward returned to be saved."""
        object.__setattr__(self, "_saved", tensors)

    @property
    def saved_tensors(self) -> tuple[Optional[torch.Tensor], ...]:
        """What save_for_backward was given."""
        return self._saved

    def with_saved(self, tensors: Sequence[Optional[torch.Tensor]]) -> OperationContext:
        """The same call with these saved tensors: each backward gets a context of its own."""
        facts = {name: getattr(self, name) for name in OperationContext.__slots__ if hasattr(self, name)}
        return type(self)(**{**facts, "_saved": tuple(tensors)})


class LegacyContext(OperationContext):
    """The context of an operation with the legacy `op_forward`: as open as torch.autograd.Function's, and as untraceable.

    It takes any attribute.
    """

    __setattr__ = object.__setattr__  # type: ignore[assignment]

    def with_saved(self, tensors: Sequence[Optional[torch.Tensor]]) -> OperationContext:
        """A copy for one backward, so that what it changes is not there in the next."""
        copy = super().with_saved(tensors)
        copy.__dict__.update(self.__dict__)
        return copy
