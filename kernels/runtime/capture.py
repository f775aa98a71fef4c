"""Whether the current stream is captured into a CUDA graph: what runs is recorded then, and runs at each replay alone."""

from __future__ import annotations

import torch


def is_captured(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
