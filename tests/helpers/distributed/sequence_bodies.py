"""What the processes of test_sequence_parallel.py do: blocks whose tokens are shared out between the linears."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from helpers.distributed.ranks import device, mesh
from helpers.models.small_models import GeluMLP, Residual, SwiGLU
from torch import nn

import te_dynamo
from te_dynamo.inspect.graphs.capture import Captured
from te_dynamo.testing import count_wire

__all__ = ["block", "capture_step", "operations_on_cpu", "steps", "steps_with_operations", "without_multicast"]

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


def gather_and_multiply(
    shard: torch.Tensor,
    weights: list[torch.Tensor],
    scale: torch.Tensor,
    scales: list[torch.Tensor],
    dim: int,
    group: str,
    biases: list[torch.Tensor | None],
    _: list[None],
    dtypes: list[int],
    fast: list[bool],
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """torch's own composition of fused_all_gather_scaled_matmul, with bytes gathered: gloo gathers no FP8."""
    from torch.distributed import _symmetric_memory as symmetric

    c10d = torch.ops._c10d_functional
    ranks = torch.distributed.distributed_c10d._get_group_size_by_name(group)
    gathered = c10d.wait_tensor(c10d.all_gather_into_tensor(shard.view(torch.uint8), ranks, group)).view(shard.dtype)
    first = torch.cat([part.movedim(dim, 0) for part in gathered.chunk(ranks)])
    products = [
        torch._scaled_mm(first.flatten(0, -2), weight, scale, weight_scale, bias, None, dtype, quick)
        for weight, weight_scale, bias, dtype, quick in zip(
            weights, scales, biases, symmetric._maybe_convert_scalar_types_to_dtypes(dtypes), fast, strict=True
        )
    ]
    return first.movedim(0, dim), [product.unflatten(0, first.shape[:-1]).movedim(0, dim) for product in products]


@contextlib.contextmanager
def operations_on_cpu() -> Iterator[None]:
    """Inside, torch's operations over symmetric memory run on a CPU, as a collective and products."""
    from torch.distributed import _symmetric_memory as symmetric

    with without_multicast(), torch.library._scoped_library("symm_mem", "IMPL") as library:
        library.impl("fused_all_gather_scaled_matmul", gather_and_multiply, "CPU")
        library.impl(
            "fused_scaled_matmul_reduce_scatter", symmetric._fused_scaled_matmul_reduce_scatter_fallback, "CPU"
        )
        yield


def without_multicast() -> Any:
    """Inside, async_tp is an option that is taken."""
    return mock.patch.dict(os.environ, {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"})


def steps_with_operations(*args: Any) -> list[dict[str, Any]]:
    """steps() with the option async_tp among its options."""
    with without_multicast() if device().type == "cuda" else operations_on_cpu():
        return steps(*args)


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
                "overlapped": sum(report.overlapped or 0 for report in graphs.reports),
                "notes": [note for report in graphs.reports for note in report.notes],
            }
        )
        torch._dynamo.reset()
    return results
