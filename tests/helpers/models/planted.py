"""A model of equal linears, one of which no format with few bits holds well: an outlier in each block of its input, or of its weight."""

from __future__ import annotations

import torch
from torch import Tensor, nn

WIDTH = 128
_EVERY = 16
"""NVFP4's block, the smallest: each block of each format has an outlier."""
_OUTLIER = 1e6


class Planted(nn.Module):
    """h -> norm(fc(h)), four times. In the planted one the outliers meet zeros of the other operand, so that its output has none.

    outlier: "x", "weight", or "" for none.
    """

    def __init__(self, outlier: str, at: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.at = at
        scale = torch.ones(WIDTH)
        if outlier:
            scale[::_EVERY] = _OUTLIER if outlier == "x" else 0.0
            with torch.no_grad():
                self.layers[at].weight[:, ::_EVERY] = 0.0 if outlier == "x" else _OUTLIER
        self.register_buffer("scale", scale)

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            h = self.norm(x)
            x = layer(h * self.scale if i == self.at else h)
        return x
