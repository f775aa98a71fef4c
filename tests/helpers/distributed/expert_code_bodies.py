"""What the processes of test_expert_codes.py do: a mixture whose experts are shared out, and whose tokens travel to them and back."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters

import te_dynamo
from te_dynamo.testing import count_wire

WIDTH, HIDDEN, EXPERTS, TOKENS = 128, 256, 8, 48
"""TOKENS: of a rank."""


class Mixture(nn.Module):
    """x + the expert of each token, whose choice is given. Experts of a rank follow each other; weights lie as [G, K, N]."""

    def __init__(self, first: int, count: int, group: Any) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        up, gate, down = (
            torch.randn(EXPERTS, *shape, generator=generator) / shape[0] ** 0.5
            for shape in ((WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH))
        )
        mine = slice(first, first + count)
        self.up, self.gate, self.down = (nn.Parameter(w[mine].bfloat16()) for w in (up, gate, down))
        self.first, self.group = first, group

    def forward(
        self, x: torch.Tensor, chosen: torch.Tensor, arriving: torch.Tensor, sent: list[int], received: list[int]
    ) -> torch.Tensor:
        """x [S, WIDTH], the expert of each token [S]; the experts of those that arrive [R]; how many each rank is sent and sends."""
        order = torch.argsort(chosen, stable=True)
        tokens = _exchanged(x[order], received, sent, self.group)
        by_expert = torch.argsort(arriving, stable=True)
        tokens = tokens[by_expert]
        experts = torch.arange(len(self.up), device=x.device) + self.first
        ends = torch.searchsorted(arriving[by_expert], experts, right=True).to(torch.int32)
        hidden = F.silu(F.grouped_mm(tokens, self.gate, offs=ends)) * F.grouped_mm(tokens, self.up, offs=ends)
        results = F.grouped_mm(hidden, self.down, offs=ends)
        back = torch.empty_like(results).index_copy(0, by_expert, results)
        back = _exchanged(back, sent, received, self.group)
        return x + torch.empty_like(back).index_copy(0, order, back)


def _exchanged(x: torch.Tensor, received: list[int], sent: list[int], group: Any) -> torch.Tensor:
    if group is None:
        return x
    from torch.distributed._functional_collectives import all_to_all_single_autograd, wait_tensor

    return wait_tensor(all_to_all_single_autograd(x, received, sent, group))


def batch(rank: int, step: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A rank's tokens, larger ones than those of the rank before, the experts that they go to, and the gradient of the mixture's output."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    x, dy = (torch.randn(TOKENS, WIDTH, generator=generator) * 2.0**rank for _ in range(2))
    chosen = torch.randint(EXPERTS, (TOKENS,), generator=generator)
    return x.bfloat16().requires_grad_(), chosen, dy.bfloat16()


def whole(ranks: int, step: int = 0) -> dict[str, torch.Tensor]:
    """The gradients of a step in one process, in the model's precision."""
    x, chosen, dy = (torch.cat(parts) for parts in zip(*(batch(rank, step) for rank in range(ranks)), strict=True))
    x = x.detach().requires_grad_()
    model = Mixture(0, EXPERTS, None)
    model(x, chosen, chosen.sort().values, [], []).backward(dy)
    return {"x": x.grad, **{name: p.grad for name, p in model.named_parameters()}}


def exchange(rank: int, step: int) -> tuple[torch.Tensor, list[int], list[int]]:
    """(the experts of the tokens that arrive, how many tokens each rank is sent, and sends)."""
    ranks = torch.distributed.get_world_size()
    count = EXPERTS // ranks
    chosen = [batch(each, step)[1].sort().values for each in range(ranks)]
    sizes = [[int((of_rank // count == to).sum()) for to in range(ranks)] for of_rank in chosen]
    arriving = torch.cat([of_rank[of_rank // count == rank] for of_rank in chosen])
    return arriving, sizes[rank], [of_rank[rank] for of_rank in sizes]


def steps(rank: int, options: list[dict[str, Any]], count: int = 1) -> list[dict[str, Any]]:
    """The last of `count` steps, of other sizes each, with each of the options."""
    experts = EXPERTS // torch.distributed.get_world_size()
    results = []
    for each in options:
        torch._dynamo.reset()
        counters["stats"].clear()
        model = Mixture(rank * experts, experts, torch.distributed.group.WORLD)
        compiled = torch.compile(model, backend="te", options={"codegen": "eager", **each})
        notes, reasons = list[str](), list[str]()
        for step in range(count):
            x, chosen, dy = batch(rank, step)
            model.zero_grad()
            with te_dynamo.capture() as graphs, count_wire() as wire:
                y = compiled(x, chosen, *exchange(rank, step))
                y.backward(dy)
            notes += [note for report in graphs.reports for note in report.notes]
            reasons += [m.reason for report in graphs.reports for m in report.matches if m.kind == "linear"]
        results.append(
            {
                "tensors": {"y": y.detach(), "x": x.grad, **{name: p.grad for name, p in model.named_parameters()}},
                "bytes": {(op, str(dtype)): count for (op, dtype), count in wire.bytes.items()},
                "reasons": reasons,
                "notes": notes,
                "graphs": counters["stats"]["unique_graphs"],
            }
        )
    return results


def unlike(rank: int, counts: list[list[int]]) -> list[torch.Tensor]:
    """The gradients of the experts of this rank after steps of which rank 1 gets so many tokens of each rank; the first rank gets the others.
    As codes, then unfused."""
    found = []
    for options in ({}, {"fusions": ["-fuse_all_to_all_quantize"]}):
        torch._dynamo.reset()
        model = Mixture(EXPERTS // 2 * rank, EXPERTS // 2, torch.distributed.group.WORLD)
        compiled = torch.compile(model, backend="te", options={"codegen": "eager", **options})
        for sent in counts:
            x, _, dy = batch(rank)
            chosen = torch.zeros(TOKENS, dtype=torch.long)
            chosen[: sent[rank]] = EXPERTS // 2
            sizes = [[TOKENS - n, n] for n in sent]
            arriving = torch.full((sum(of_rank[rank] for of_rank in sizes),), EXPERTS // 2 * rank)
            compiled(x, chosen, arriving, sizes[rank], [of_rank[rank] for of_rank in sizes]).backward(dy)
        found += [p.grad for p in model.parameters()]
    return found
