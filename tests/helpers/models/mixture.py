"""A small mixture of experts, as models write it: top-1 routing, tokens sorted by expert, grouped products. Its experts may lie on several
ranks, which exchange tokens by all-to-all. Nothing here knows of the package."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Experts(nn.Module):
    """x [tokens, width], sorted by expert, counts [experts] -> [tokens, width]."""

    def __init__(self, experts: int, width: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(experts, width, 2 * width) / width**0.5)
        self.down = nn.Parameter(torch.randn(experts, 2 * width, width) / (2 * width) ** 0.5)

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        ends = counts.cumsum(0).int()
        return F.grouped_mm(F.silu(F.grouped_mm(x, self.up, offs=ends)), self.down, offs=ends)


class Mixture(nn.Module):
    """group: the ranks among which `experts` are shared out, in their order; None is this process alone."""

    def __init__(self, width: int, experts: int = 4) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(width, experts, bias=False), Experts(experts, width)
        self.count, self.group = experts, None

    def forward(self, x: Tensor) -> Tensor:
        shape, x = x.shape, x.flatten(0, 1)
        weight, expert = self.router(x).softmax(-1).max(-1)
        order, counts = expert.argsort(stable=True), expert.bincount(minlength=self.count)
        rows = x[order]
        if self.group is None:
            y = self.experts(rows, counts)
        else:
            ranks = self.group.size()
            given = exchange(counts, None, None, self.group).view(ranks, -1)  # [ranks that it comes from, experts here]
            sent = counts.view(ranks, -1).sum(1).tolist()
            received = given.sum(1).tolist()
            rows = exchange(rows, received, sent, self.group)
            here = torch.arange(given.shape[1]).repeat(ranks).to(x.device).repeat_interleave(given.flatten())
            by_expert = here.argsort(stable=True)
            y = self.experts(rows[by_expert], given.sum(0))[by_expert.argsort()]
            y = exchange(y, sent, received, self.group)
        return (y[order.argsort()] * weight[:, None]).view(shape)


def exchange(x: Tensor, received: Any, sent: Any, group: Any) -> Tensor:
    """All-to-all of rows; received, sent: how many from and to each rank, None if equally many."""
    from torch.distributed._functional_collectives import all_to_all_single, all_to_all_single_autograd, wait_tensor

    if not x.requires_grad:
        return wait_tensor(all_to_all_single(x, received, sent, group))
    return wait_tensor(all_to_all_single_autograd(x, received, sent, group))
