"""Collectives over a process group, functional, so that they trace. On one process each is the identity."""

from __future__ import annotations

from typing import Any, Optional

import torch

from te_dynamo.errors import InputError
from te_dynamo.operations import types
from te_dynamo.operations.context import OperationContext
from te_dynamo.operations.saves import SavesAll
from te_dynamo.quantized.tensor_proto import TensorProto


class Collective(SavesAll, abstract=True):
    """group: the name of a process group (`group.group_name`), None for all processes. Along the leading dimension."""

    group: Optional[str] = None

    def ranks(self) -> int:
        """How many processes share the group; 1 without torch.distributed."""
        dist = torch.distributed
        if not (dist.is_available() and dist.is_initialized()):
            return 1
        return dist.get_world_size(dist.distributed_c10d._resolve_process_group(self._name()))

    def _name(self) -> Any:
        return self.group or torch.distributed.group.WORLD.group_name  # type: ignore[union-attr]

    def _gathered(self, x: torch.Tensor) -> torch.Tensor:
        """[ranks * L, ...]: the tensors of all processes, one after another."""
        if self.ranks() == 1:
            return x
        functional = torch.ops._c10d_functional
        return functional.wait_tensor(functional.all_gather_into_tensor(x.contiguous(), self.ranks(), self._name()))

    def _reduced(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over the processes."""
        if self.ranks() == 1:
            return x
        functional = torch.ops._c10d_functional
        return functional.wait_tensor(functional.all_reduce(x.contiguous(), "sum", self._name()))

    def _scattered(self, x: torch.Tensor) -> torch.Tensor:
        """[L / ranks, ...]: this process's share of the sum."""
        if self.ranks() == 1:
            return x
        functional = torch.ops._c10d_functional
        return functional.wait_tensor(
            functional.reduce_scatter_tensor(x.contiguous(), "sum", self.ranks(), self._name())
        )

    def _fake(self, input: TensorProto, shape: tuple[int, ...]) -> types.Fake:
        if self.ranks() == 1:
            return input, []
        return TensorProto(shape, input.dtype, device=input.device), []


class AllGather(Collective):
    """y [ranks * L, ...] = every process's x [L, ...]. Backward: reduce-scatter."""

    def op_forward_compute(self, input: torch.Tensor, params: types.Params, **_: Any) -> types.Forward:
        return self._gathered(input), []

    def op_forward_fake(self, input: TensorProto, params: types.Protos, **_: Any) -> types.Fake:
        return self._fake(input, (self.ranks() * input.shape[0], *input.shape[1:]))

    def op_backward(self, ctx: OperationContext, grad_output: torch.Tensor) -> types.Backward:
        return self._scattered(grad_output), ()


class AllReduce(Collective):
    """y = the sum of every process's x. Backward: the identity, for a gradient that is the same on every process."""

    def op_forward_compute(self, input: torch.Tensor, params: types.Params, **_: Any) -> types.Forward:
        return self._reduced(input), []

    def op_forward_fake(self, input: TensorProto, params: types.Protos, **_: Any) -> types.Fake:
        return self._fake(input, input.shape)

    def op_backward(self, ctx: OperationContext, grad_output: torch.Tensor) -> types.Backward:
        return grad_output, ()


class ReduceScatter(Collective):
    """y [L / ranks, ...] = this process's share of the sum of every process's x [L, ...]. Backward: all-gather.

    Raises InputError where the processes cannot share L evenly.
    """

    def _share(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        if shape[0] % self.ranks():
            raise InputError(f"ReduceScatter: {self.ranks()} processes cannot share a leading dimension of {shape[0]}")
        return (shape[0] // self.ranks(), *shape[1:])

    def op_forward_compute(self, input: torch.Tensor, params: types.Params, **_: Any) -> types.Forward:
        self._share(tuple(input.shape))
        return self._scattered(input), []

    def op_forward_fake(self, input: TensorProto, params: types.Protos, **_: Any) -> types.Fake:
        return self._fake(input, self._share(input.shape))

    def op_backward(self, ctx: OperationContext, grad_output: torch.Tensor) -> types.Backward:
        return self._gathered(grad_output), ()
