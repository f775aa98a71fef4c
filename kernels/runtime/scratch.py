"""Global memory for the tensor descriptors that a kernel makes: one buffer for each device and stream, kept.

Kernels of one stream run one after the other, and a descriptor is read by the launch alone that wrote it, so they share a buffer. No
kernel that is launched early (dependent_launch.py), beside its predecessor's end, makes descriptors. To allocate at each launch costs
the CPU as much as half a launch. What a CUDA graph captures is allocated in the graph's own memory: its replays may run beside anything.
"""

from __future__ import annotations

import concurrent.futures

import torch

KEPT_BYTES = 256 * 1024
"""Of each buffer: five descriptors of 128 bytes for each of 400 programs. Rarer launches of more allocate."""

_kept: dict[tuple[int, int], torch.Tensor] = {}
"""By device and stream."""


def scratch(size: int, alignment: int, stream: int | None) -> torch.Tensor:
    """Triton's allocator of a launch on the current device and stream; torch's memory is aligned to 512 bytes."""
    if size > KEPT_BYTES or torch.cuda.is_current_stream_capturing():
        return fresh(size, alignment, stream)
    place = torch.cuda.current_device(), stream or 0
    kept = _kept.get(place)
    if kept is None:
        # Around a run that precedes a capture, torch gives this thread memory of the graph that is to come, and checks that nothing
        # but its results stays there.
        with concurrent.futures.ThreadPoolExecutor(1) as other_thread:
            _kept[place] = kept = other_thread.submit(_allocate, *place).result()
    return kept


def fresh(size: int, alignment: int, stream: int | None) -> torch.Tensor:
    """The same for a launch that shares with none."""
    return torch.empty(size, dtype=torch.int8, device="cuda")


def _allocate(device: int, stream: int) -> torch.Tensor:
    """A buffer whose earlier owner's work ends before what this stream does next."""
    on_stream = torch.cuda.ExternalStream(stream, device) if stream else None
    with torch.cuda.device(device), torch.cuda.stream(on_stream):  # type: ignore[arg-type]
        return torch.empty(KEPT_BYTES, dtype=torch.int8, device="cuda")
