"""What the processes of test_expert_parallel.py do: a mixture whose experts are shared out, and whose tokens travel to them and back."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import te_dynamo
from te_dynamo.testing import count_wire

__all__ = ["Mixture", "steps", "whole"]

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
    """A rank's tokens, of other sizes than the others', the experts that they go to, and the gradient of the mixture's output."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    x, dy = (torch.randn(TOKENS, WIDTH, generator=generator) * 2.0**rank for _ in range(2))
    chosen = torch.randint(EXPERTS, (TOKENS,), generator=generator)
    return x.bfloat16().requires_grad_(), chosen, dy.bfloat16()


def whole(ranks: int) -> dict[str, torch.Tensor]:
    """The gradients in one process, in the model's precision."""
    x, chosen, dy = (torch.cat(parts) for parts in zip(*map(batch, range(ranks)), strict=True))
    x = x.detach().requires_grad_()
    model = Mixture(0, EXPERTS, None)
    model(x, chosen, chosen.sort().values, [], []).backward(dy)
    return {"x": x.grad, **{name: p.grad for name, p in model.named_parameters()}}


def steps(rank: int, options: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A step of each of the options."""
    ranks = torch.distributed.get_world_size()
    count = EXPERTS // ranks
    of_all = [batch(each)[1] for each in range(ranks)]
    sizes = [[int((chosen // count == to).sum()) for to in range(ranks)] for chosen in of_all]
    arriving = torch.cat([chosen.sort().values[chosen.sort().values // count == rank] for chosen in of_all])
    results = []
    for each in options:
        model = Mixture(rank * count, count, torch.distributed.group.WORLD)
        x, chosen, dy = batch(rank)
        with te_dynamo.capture() as graphs, count_wire() as wire:
            compiled = torch.compile(model, backend="te", options={"codegen": "eager", **each})
            y = compiled(x, chosen, arriving, sizes[rank], [row[rank] for row in sizes])
            y.backward(dy)
        results.append(
            {
                "tensors": {"y": y.detach(), "x": x.grad, **{name: p.grad for name, p in model.named_parameters()}},
                "bytes": {(op, str(dtype)): count for (op, dtype), count in wire.bytes.items()},
                "linears": [(m.matched, m.reason) for r in graphs.reports for m in r.matches if m.kind == "linear"],
                "notes": [note for report in graphs.reports for note in report.notes],
            }
        )
        torch._dynamo.reset()
    return results
