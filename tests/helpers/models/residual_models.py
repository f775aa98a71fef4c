"""Models in which several fusions of one half meet."""

from __future__ import annotations

import torch.nn.functional as F
from helpers.models.snapshot_models import FFN, HIDDEN
from torch import Tensor, nn

from te_dynamo.passes.dialect.fusions import SHIPPED

# Without the joint ones, which run on inference graphs too: their halves go together.
NAMES = {kind: [f.__name__ for f in fusions if f not in SHIPPED["joint"]] for kind, fusions in SHIPPED.items()}


class GeluResidual(nn.Module):
    """A linear and a GELU MLP behind a LayerNorm, biases everywhere, each added to the residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(HIDDEN, HIDDEN), nn.LayerNorm(HIDDEN)
        self.fc1, self.fc2 = nn.Linear(HIDDEN, FFN), nn.Linear(FFN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        h = x + self.first(x)
        return h + self.fc2(F.gelu(self.fc1(self.norm(h))))


class SwigluResidual(nn.Module):
    """The same with RMSNorm and SwiGLU, without biases."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(HIDDEN, HIDDEN, bias=False), nn.RMSNorm(HIDDEN, eps=1e-5)
        self.gate, self.up = (nn.Linear(HIDDEN, FFN, bias=False) for _ in range(2))
        self.down = nn.Linear(FFN, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = x + self.first(x)
        y = self.norm(h)
        return h + self.down(F.silu(self.gate(y)) * self.up(y))
