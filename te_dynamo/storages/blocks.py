"""What the storages with scales for blocks share: a scale spread over its block."""

from __future__ import annotations

import torch

from te_dynamo.quantizers.formats import tiles

__all__ = ["spread"]


def spread(scales: torch.Tensor, block: tuple[int, int], shape: tuple[int, int]) -> torch.Tensor:
    """scales [a, b] or more, each for a block of `block` values, as one number for each value of a matrix of `shape`."""
    rows, columns = tiles(shape[0], block[0]), tiles(shape[1], block[1])
    blocks = scales[:rows, None, :columns, None].expand(-1, block[0], -1, block[1])
    return blocks.reshape(rows * block[0], columns * block[1])[: shape[0], : shape[1]]
