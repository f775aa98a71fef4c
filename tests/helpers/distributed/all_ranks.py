"""A graph run for all ranks at once in one process: what each rank would compute, collectives included."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

_c10d = torch.ops._c10d_functional


def run_all_ranks(graph: fx.Graph, inputs: Sequence[Sequence[Tensor]]) -> list[Any]:
    """What the graph returns on each rank, given `inputs[rank]`."""
    env: dict[fx.Node, list[Any]] = {}
    given = iter(zip(*inputs, strict=True))
    for node in graph.nodes:
        if node.op == "placeholder":
            env[node] = list(next(given))
            continue
        of_ranks = [
            fx.map_arg((node.args, node.kwargs), lambda n, rank=rank: env[n][rank]) for rank in range(len(inputs))
        ]
        if node.op == "output":
            return [args[0] for args, _ in of_ranks]
        env[node] = list(_called(node.target, of_ranks))
    raise AssertionError("the graph has no output")


def _called(target: Any, of_ranks: list[Any]) -> list[Any]:
    values = [args[0] for args, _ in of_ranks]
    if target is _c10d.all_gather_into_tensor.default:
        return [torch.cat(values)] * len(values)
    if target is _c10d.all_reduce.default:
        stacked = torch.stack(values)
        return [stacked.amax(0) if of_ranks[0][0][1] == "max" else stacked.sum(0)] * len(values)
    if target is _c10d.all_to_all_single.default:
        parts = [value.split(args[2]) for value, (args, _) in zip(values, of_ranks, strict=True)]
        return [torch.cat(received) for received in zip(*parts, strict=True)]
    if target is _c10d.reduce_scatter_tensor.default:
        stacked = torch.stack(values)
        reduced = stacked.amax(0) if of_ranks[0][0][1] == "max" else stacked.sum(0)
        return [*reduced.chunk(len(values))]
    if target is _c10d.wait_tensor.default:
        return values
    assert isinstance(target, torch._ops.OpOverload) or target is operator.getitem, target
    return [target(*args, **kwargs) for args, kwargs in of_ranks]
