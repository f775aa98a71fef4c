"""kernels/runtime/scratch.py: a buffer is one stream's alone, and a CUDA graph's memory is its own."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from te_dynamo.kernels.runtime import scratch as module
from te_dynamo.kernels.runtime.scratch import KEPT_BYTES, scratch


class Cuda:
    """torch.cuda of two devices: `allocated` says by which thread, on which device and stream."""

    def __init__(self) -> None:
        self.device, self.capturing = 0, False
        self.allocated: list[tuple[int, str, int, Any]] = []
        self._entered: list[tuple[str, Any]] = []

    def current_device(self) -> int:
        return self.device

    def is_current_stream_capturing(self) -> bool:
        return self.capturing

    def ExternalStream(self, stream: int, device: int) -> tuple[int, int]:
        return stream, device

    @contextlib.contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        self._entered.append(("stream", stream))
        yield
        self._entered.pop()

    @contextlib.contextmanager
    def device_of(self, device: int) -> Iterator[None]:
        self._entered.append(("device", device))
        yield
        self._entered.pop()

    def empty(self, size: int, dtype: torch.dtype, device: str) -> torch.Tensor:
        who = "this thread" if threading.current_thread() is threading.main_thread() else "another"
        self.allocated.append((size, who, *(entered for _, entered in self._entered)))
        return torch.zeros(size, dtype=dtype)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    found = Cuda()
    monkeypatch.setattr(module, "_kept", {})
    for name in ("current_device", "is_current_stream_capturing", "ExternalStream", "stream"):
        monkeypatch.setattr(torch.cuda, name, getattr(found, name))
    monkeypatch.setattr(torch.cuda, "device", found.device_of)
    real = torch.empty
    monkeypatch.setattr(
        torch,
        "empty",
        lambda *size, **how: found.empty(*size, **how) if how.get("device") == "cuda" else real(*size, **how),
    )
    return found


def test_a_buffer_of_each_device_and_stream_is_kept(cuda: Cuda) -> None:
    ours = scratch(1000, 128, 5)
    assert scratch(KEPT_BYTES, 128, 5) is ours and scratch(1000, 128, 6) is not ours
    cuda.device = 1
    assert scratch(1000, 128, 5) is not ours
    default = scratch(1000, 128, 0)
    assert scratch(1000, 128, None) is default
    streams = [(0, (5, 0)), (0, (6, 0)), (1, (5, 1)), (1, None)]
    assert cuda.allocated == [(KEPT_BYTES, "another", *place) for place in streams]


def test_a_graph_that_is_captured_has_its_own(cuda: Cuda) -> None:
    kept = scratch(1000, 128, 5)
    cuda.capturing = True
    assert scratch(1000, 128, 5) is not kept
    assert cuda.allocated[1:] == [(1000, "this thread")]
    cuda.capturing = False
    assert scratch(1000, 128, 5) is kept


def test_a_larger_one_is_allocated_each_time(cuda: Cuda) -> None:
    for _ in range(2):
        assert scratch(KEPT_BYTES + 1, 128, 5).numel() == KEPT_BYTES + 1
    assert cuda.allocated == 2 * [(KEPT_BYTES + 1, "this thread")]


def test_no_memory_is_an_error_and_leaves_nothing(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing_left(*_: Any, **__: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(cuda, "empty", nothing_left)
        with pytest.raises(torch.OutOfMemoryError):
            scratch(1000, 128, 5)
    assert scratch(1000, 128, 5).numel() == KEPT_BYTES


def test_the_buffer_has_room_for_every_gpus_programs() -> None:
    from te_dynamo.kernels.runtime.target import TARGETS

    descriptors, most_programs = 5, 2 * max(target.multiprocessors for target in TARGETS.values())
    assert descriptors * 128 * most_programs <= KEPT_BYTES
