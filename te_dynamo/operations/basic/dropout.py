"""Dropout, whose backward uses the mask of its forward."""

from __future__ import annotations

from typing import Any

import torch

from te_dynamo.errors import InvalidOptionError
from te_dynamo.operations import types
from te_dynamo.operations.context import OperationContext
from te_dynamo.operations.saves import SavesAll
from te_dynamo.quantized.tensor_proto import TensorProto


class Dropout(SavesAll):
    """In training y = x * mask / (1 - p), every element kept with probability 1 - p; otherwise y = x.

    Saves the mask (bool). It is drawn from torch's random state, which torch.utils.checkpoint restores when it computes forward
    again. Raises InvalidOptionError for a p outside of [0, 1].
    """

    p: float

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.p <= 1:
            raise InvalidOptionError(f"Dropout: p is a probability, got {self.p}")

    def _drops(self, training: bool) -> bool:
        return training and self.p > 0

    def _masked(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        scale = 1 / (1 - self.p) if self.p < 1 else 0.0
        return (x.to(torch.float32) * mask * scale).to(x.dtype)

    def op_forward_compute(
        self, input: torch.Tensor, params: types.Params, *, training: bool, **_: Any
    ) -> types.Forward:
        if not self._drops(training):
            return input, []
        mask = torch.rand(input.shape, dtype=torch.float32, device=input.device) >= self.p
        return self._masked(input, mask), [mask]

    def op_forward_fake(self, input: TensorProto, params: types.Protos, *, training: bool, **_: Any) -> types.Fake:
        if not self._drops(training):
            return input, []
        output = TensorProto(input.shape, input.dtype, device=input.device)
        return output, [TensorProto(input.shape, torch.bool, device=input.device)]

    def op_backward(self, ctx: OperationContext, grad_output: torch.Tensor) -> types.Backward:
        if not self._drops(ctx.training):
            return grad_output, ()
        (mask,) = ctx.saved_tensors
        assert mask is not None
        return self._masked(grad_output, mask), ()
