"""What the storages with scales for blocks share: a scale spread over its block."""

from __future__ import annotations

import torch


def spread(scales: torch.Tensor, block: tuple[int, int], shape: tuple[int, int]) -> torch.Tensor:
    """scales [a, b] or more, each for a block of `block` values, as one number for each value of a matrix of `shape`.

    By index: a view expanded, reshaped and cut where the last block is not whole is miscompiled by Inductor's vectorized
    CPU code (torch 2.11 to 2.15), which reads the scale before for the values after the last boundary.
    """
    rows = torch.arange(shape[0], device=scales.device) // block[0]
    columns = torch.arange(shape[1], device=scales.device) // block[1]
    return scales[rows[:, None], columns[None, :]]
