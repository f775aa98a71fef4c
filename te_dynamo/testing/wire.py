"""`count_wire`: how many bytes each kind of collective brings to this rank, by dtype.

Every collective runs an operator of `c10d`: one that Python calls (FSDP2, `torch.distributed`), one of C++ (DDP), one of a compiled
graph (`_c10d_functional`, DTensors). `count_wire` puts a kernel in front of the operator's own, at a dispatch key that all of these pass,
whatever the backend. A dispatch mode would not do: Dynamo compiles nothing inside of one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor


@dataclasses.dataclass
class Wire:
    """What came to this rank from others.

    bytes: (operation, dtype) -> bytes. Operations are named as `count_wire` lists them.
    calls: (operation, dtype) -> collectives. One of several tensors counts once for each dtype among them.
    """

    bytes: dict[tuple[str, torch.dtype], int] = dataclasses.field(default_factory=dict)
    calls: dict[tuple[str, torch.dtype], int] = dataclasses.field(default_factory=dict)

    def total(self, operation: str | None = None, dtype: torch.dtype | None = None) -> int:
        """Bytes of one operation, of one dtype, of both, or of all."""
        return sum(n for (name, of), n in self.bytes.items() if operation in (None, name) and dtype in (None, of))

    def table(self) -> str:
        """A line for each operation and dtype: calls and bytes."""
        return "\n".join(
            f"{name:15}{str(dtype).removeprefix('torch.'):15}{self.calls[name, dtype]:6} calls{count:14,} bytes"
            for (name, dtype), count in sorted(self.bytes.items(), key=str)
        )


@contextlib.contextmanager
def count_wire() -> Iterator[Wire]:
    """Counts the collectives that this rank starts inside, of all process groups, on gloo as on NCCL.

    What counts is what has to come from other ranks, whatever way the transport takes. Of a group of g ranks:

        all_gather       the result, without this rank's part
        reduce_scatter   (g - 1) results: a part of the sum from each other rank
        all_reduce       2 (g - 1) / g results: a reduce_scatter, and an all_gather of what it gives
        all_to_all       the result, without what this rank gave itself
        broadcast, recv, scatter    the result; for the rank that it comes from nothing
        gather, reduce   at the root as all_gather and reduce_scatter; elsewhere nothing

    Barriers, and sends at the sender, count nothing. The dtype is that of the tensor that travels: FP8 sent as uint8 is uint8. What
    avoids process groups (symmetric memory) is not seen. One at a time in a process, of all its threads.
    """
    wire = Wire()
    library = torch.library.Library("c10d", "IMPL")
    for name, (operation, received) in _OPERATORS.items():
        own = getattr(torch.ops.c10d, name).default
        library.impl(name, functools.partial(_count, wire, operation, received, own), "BackendSelect", with_keyset=True)
    try:
        yield wire
    finally:
        library._destroy()


_BELOW = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)

Received = Callable[..., Sequence[tuple[Tensor, float]]]
"""The arguments of an operator -> tensors, and how many times their bytes come from others."""


def _count(wire: Wire, operation: str, received: Received, own: Any, keys: Any, *args: Any) -> Any:
    counted = [(tensor.dtype, round(times * tensor.nbytes)) for tensor, times in received(*args)]
    for dtype, count in counted:
        wire.bytes[operation, dtype] = wire.bytes.get((operation, dtype), 0) + count
    for dtype in {dtype for dtype, count in counted if count}:
        wire.calls[operation, dtype] = wire.calls.get((operation, dtype), 0) + 1
    # Without the interpreter's lock, which `call_boxed` of a kernel would keep: gloo's threads need it to end what runs before.
    return own.redispatch(keys & _BELOW, *args)


def _flat(tensors: Any) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else [one for each in tensors for one in _flat(each)]


def _each(tensors: Any, times: float) -> list[tuple[Tensor, float]]:
    return [(tensor, times) for tensor in _flat(tensors)]


def _group(boxed: Any) -> Any:
    return torch.distributed.ProcessGroup.unbox(boxed)


def _gathered(outputs: Any, inputs: Any, *_: Any) -> list[tuple[Tensor, float]]:
    return [*_each(outputs, 1), *_each(inputs, -1)]


def _scattered_sum(outputs: Any, _inputs: Any, group: Any, *_: Any) -> list[tuple[Tensor, float]]:
    return _each(outputs, _group(group).size() - 1)


def _sum(tensors: Any, group: Any, *_: Any) -> list[tuple[Tensor, float]]:
    size = _group(group).size()
    return _each(tensors, 2 * (size - 1) / size)


def _exchanged(outputs: Any, _inputs: Any, group: Any, output_rows: Any = (), *_: Any) -> list[tuple[Tensor, float]]:
    size, rank = _group(group).size(), _group(group).rank()
    if not isinstance(outputs, Tensor):
        return [(tensor, 1) for i, tensor in enumerate(outputs) if i != rank]
    return [(outputs, 1 - output_rows[rank] / max(sum(output_rows), 1) if output_rows else (size - 1) / size)]


def _from_root(tensors: Any, group: Any, root: int, *_: Any) -> list[tuple[Tensor, float]]:
    return _each(tensors, _group(group).rank() != root)


def _part_from_root(outputs: Any, _inputs: Any, group: Any, root: int, *_: Any) -> list[tuple[Tensor, float]]:
    return _from_root(outputs, group, root)


def _gathered_at_root(outputs: Any, inputs: Any, group: Any, root: int, *_: Any) -> list[tuple[Tensor, float]]:
    return _gathered(outputs, inputs) if _group(group).rank() == root else []


def _sum_at_root(tensors: Any, group: Any, _operation: Any, root: int, *_: Any) -> list[tuple[Tensor, float]]:
    return _each(tensors, _group(group).size() - 1) if _group(group).rank() == root else []


def _received(tensors: Any, *_: Any) -> list[tuple[Tensor, float]]:
    return _each(tensors, 1)


_OPERATORS: dict[str, tuple[str, Received]] = {
    "allgather_": ("all_gather", _gathered),
    "_allgather_base_": ("all_gather", _gathered),
    "allgather_coalesced_": ("all_gather", _gathered),
    "allgather_into_tensor_coalesced_": ("all_gather", _gathered),
    "reduce_scatter_": ("reduce_scatter", _scattered_sum),
    "_reduce_scatter_base_": ("reduce_scatter", _scattered_sum),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", _scattered_sum),
    "allreduce_": ("all_reduce", _sum),
    "allreduce_coalesced_": ("all_reduce", _sum),
    "alltoall_": ("all_to_all", _exchanged),
    "alltoall_base_": ("all_to_all", _exchanged),
    "broadcast_": ("broadcast", _from_root),
    "scatter_": ("scatter", _part_from_root),
    "gather_": ("gather", _gathered_at_root),
    "reduce_": ("reduce", _sum_at_root),
    "recv_": ("recv", _received),
    "recv_any_source_": ("recv", _received),
}
