"""Operations that save for backward all that their forward returns to be saved, as the shipped ones do."""

from __future__ import annotations

from collections.abc import Sequence

from te_dynamo.operations import types
from te_dynamo.operations.context import OperationContext
from te_dynamo.operations.op import BasicOperation, FusibleOperation


class SavesAll(BasicOperation, abstract=True):
    """A basic operation without extra inputs and outputs."""

    def op_forward_save_ctx(self, ctx: OperationContext, tensors_to_save: types.Saved) -> None:
        ctx.save_for_backward(*tensors_to_save)


class FuserSavesAll(FusibleOperation, abstract=True):
    """Mixed into a basic operation with extra inputs or outputs, or into a fused operation."""

    def fuser_forward_save_ctx(self, ctxs: Sequence[OperationContext], tensors_to_save: Sequence[types.Saved]) -> None:
        for ctx, tensors in zip(ctxs, tensors_to_save, strict=True):
            ctx.save_for_backward(*tensors)
