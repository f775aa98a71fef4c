"""What the processes of test_sequence_parallel.py do: blocks whose tokens are shared out between the linears."""

from __future__ import annotations

from typing import Any

import torch
from helpers.distributed.ranks import device, mesh
from helpers.models.small_models import GeluMLP, Residual, SwiGLU
from torch import nn

import te_dynamo
from te_dynamo.inspect.graphs.capture import Captured
from te_dynamo.testing import count_wire

MLPS: dict[str, type[nn.Module]] = {"gelu": GeluMLP, "swiglu": SwiGLU}
COLUMN = {"gelu": ["up"], "swiglu": ["gate", "up"]}


def block(kind: str, width: int = 32) -> nn.Module:
    """x + mlp(norm(x)), with norm and sum on a rank's tokens (dimension 1), and the MLP's weights shared out."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    torch.manual_seed(0)
    shared = Residual(MLPS[kind](width), norm=lambda: nn.RMSNorm(width)).bfloat16().to(device())
    plan: dict[str, Any] = {
        "norms.0": SequenceParallel(),
        "parts.0": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        **{f"parts.0.{name}": ColwiseParallel() for name in COLUMN[kind]},
        "parts.0.down": RowwiseParallel(output_layouts=Shard(1)),
    }
    return parallelize_module(shared, mesh(), plan)


def capture_step(shared: nn.Module, x: torch.Tensor, options: dict[str, Any]) -> tuple[torch.Tensor, Captured]:
    """(the block's output on this rank, the graphs) of a step of training."""
    with te_dynamo.capture() as graphs:
        y = torch.compile(shared, backend="te", options={"codegen": "eager", **options})(x)
        y.float().square().mean().backward()
    return y.detach(), graphs


def steps(
    rank: int, kind: str, options: list[dict[str, Any]], batch: int = 2, tokens: int = 24
) -> list[dict[str, Any]]:
    """A step of each of the options. tokens: of this rank."""
    results = []
    for each in options:
        shared = block(kind)
        torch.manual_seed(rank + 1)
        x = torch.randn(batch, tokens, 32).bfloat16().to(device()).requires_grad_()
        with count_wire() as wire:
            y, graphs = capture_step(shared, x, each)
        gradients = {name: p.grad.full_tensor() for name, p in shared.named_parameters()}
        results.append(
            {
                "tensors": {"y": y, "x": x.grad, **gradients},
                "gathered": {str(d).removeprefix("torch."): n for (o, d), n in wire.bytes.items() if o == "all_gather"},
                "bytes": wire.total("all_gather"),
                "linears": [(m.module, m.reason) for r in graphs.reports for m in r.matches if m.kind == "linear"],
                # But for those on widths too small to be stacked.
                "notes": [n for report in graphs.reports for n in report.notes if "not stacked" not in n],
            }
        )
        torch._dynamo.reset()
    return results
