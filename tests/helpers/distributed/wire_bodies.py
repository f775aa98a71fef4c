"""What the processes of test_wire.py do: collectives of known sizes, counted."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from helpers.distributed.ranks import SIZE, device, mesh
from torch import nn

from te_dynamo.testing import Wire, count_wire

N = 64
"""Values of a rank's part."""


def _in_words(wire: Wire) -> dict[str, tuple[int, int]]:
    return {
        f"{name} {str(dtype).removeprefix('torch.')}": (wire.calls.get((name, dtype), 0), count)
        for (name, dtype), count in wire.bytes.items()
    }


def each_operation(rank: int) -> dict[str, dict[str, tuple[int, int]]]:
    """(calls, bytes) by operation and dtype, of each call by itself."""
    part = torch.ones(N, dtype=torch.bfloat16, device=device())
    whole = torch.ones(SIZE * N, dtype=torch.bfloat16, device=device())
    codes = torch.ones(N, dtype=torch.uint8, device=device())
    parts = list(whole.chunk(SIZE))
    uneven = [N // 4, 3 * N // 4]  # how many rows each rank gives this one
    calls = {
        "all_gather": lambda: dist.all_gather(parts, part),
        "all_gather of codes": lambda: dist.all_gather(list(codes.repeat(2).chunk(SIZE)), codes),
        "reduce_scatter": lambda: dist.reduce_scatter(part, parts),
        "all_reduce": lambda: dist.all_reduce(part),
        "all_to_all": lambda: dist.all_to_all_single(torch.empty_like(part), part),
        "uneven all_to_all": lambda: dist.all_to_all_single(
            torch.empty_like(part), whole[: SIZE * uneven[rank]], uneven, [uneven[rank]] * SIZE
        ),
        "broadcast": lambda: dist.broadcast(part, 0),
        "scatter": lambda: dist.scatter(part, parts if rank == 0 else None, 0),
        "gather": lambda: dist.gather(part, parts if rank == 0 else None, 0),
        "reduce": lambda: dist.reduce(part, 0),
        "one way": lambda: dist.send(part, 1) if rank == 0 else dist.recv(part, 0),
        "barrier": dist.barrier,
    }
    counted = {}
    for name, call in calls.items():
        with count_wire() as wire:
            call()
        counted[name] = _in_words(wire)
    dist.all_reduce(part)  # nobody counts
    assert _in_words(wire) == counted["barrier"]
    return counted


def _graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def compiled(rank: int) -> dict[str, tuple[int, int]]:
    """Functional collectives of a compiled graph, backward with them."""
    import torch.distributed._functional_collectives as funcol

    @torch.compile(fullgraph=True, backend="aot_eager")
    def gathered(x: torch.Tensor) -> torch.Tensor:
        return funcol.all_gather_tensor_autograd(x * 2, 0, dist.group.WORLD).sin()

    x, before = torch.ones(N, 2, device=device(), requires_grad=True), _graphs()
    with count_wire() as wire:
        gathered(x).sum().backward()
    assert _graphs() == before + 1
    return _in_words(wire)


def fsdp2(rank: int) -> dict[str, tuple[int, int]]:
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(nn.Linear(N, N, bias=False).bfloat16().to(device()), mesh=mesh())
    with count_wire() as wire:
        model(torch.ones(2, N, device=device(), dtype=torch.bfloat16)).sum().backward()
    return _in_words(wire)


def ddp(rank: int) -> dict[str, tuple[int, int]]:
    model = nn.parallel.DistributedDataParallel(nn.Linear(N, N, bias=False).to(device()))
    with count_wire() as wire:
        model(torch.ones(2, N, device=device())).sum().backward()
    return _in_words(wire)


def table(rank: int) -> dict[str, Any]:
    with count_wire() as wire:
        dist.all_reduce(torch.ones(N, device=device()))
        dist.all_reduce(torch.ones(N, device=device()))
    return {"table": wire.table(), "all": wire.total(), "of none": wire.total("all_gather")}
