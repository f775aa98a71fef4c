"""Gated MLPs whose gate and up are one linear or two."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

TOKENS, WIDTH, INNER = 1024, 512, 1792

"""An eighth of a Llama-8B MLP's sides, and of 8192 tokens: every tensor has a 64th of its bytes."""


class WideMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH, eps=1e-5)
        self.gate, self.up = nn.Linear(WIDTH, INNER, bias=False), nn.Linear(WIDTH, INNER, bias=False)
        self.down = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class GateUpMLP(nn.Module):
    """The same with one linear for gate and up."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH, eps=1e-5)
        self.gate_up, self.down = nn.Linear(WIDTH, 2 * INNER, bias=False), nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(self.norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Gated(nn.Module):
    """Ends with the gated activation: what it is differentiated from is the caller's."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(64, 128, bias=False), nn.Linear(64, 128, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.gate(x)) * self.up(x)
