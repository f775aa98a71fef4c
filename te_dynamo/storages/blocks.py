"""What the storages with scales for blocks share: a scale spread over its block."""

from __future__ import annotations

import torch

__all__ = ["spread"]


def spread(scales: torch.Tensor, block: tuple[int, int], shape: tuple[int, int]) -> torch.Tensor:
    """scales [a, b], each for a block of `block` values, as one number a value of a matrix of `shape`."""
    rows = torch.arange(shape[0], device=scales.device) // block[0]
    columns = torch.arange(shape[1], device=scales.device) // block[1]
    return scales[rows[:, None], columns[None, :]]
