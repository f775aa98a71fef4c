"""Graphs in which several te operations of one tensor each follow each other."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from te_dynamo.quantized.quantizers import Float8CurrentScalingQuantizer

te, aten = torch.ops.te, torch.ops.aten

BOTH = Float8CurrentScalingQuantizer()

SHAPE = (32, 64)


def call(graph: fx.Graph, target: Any, *args: Any) -> fx.Node:
    node = graph.call_function(target, args)
    node.meta["val"] = target(*fx.map_arg(args, lambda n: n.meta["val"]))
    return node


def graph_of(*calls: tuple[Any, ...], dtypes: tuple[torch.dtype, ...] = ()) -> fx.Graph:
    """Operations of one tensor each, and every one of their results."""
    graph, results = fx.Graph(), []
    for number, (target, *rest) in enumerate(calls):
        x = graph.placeholder(f"x{number}")
        dtype = dtypes[number] if dtypes else torch.bfloat16
        x.meta["val"] = torch.empty(*SHAPE, dtype=dtype, device="cuda")
        node = call(graph, target.default, x, *rest)
        values = node.meta["val"]
        items = range(0 if isinstance(values, torch.Tensor) else len(values))
        results += [call(graph, operator.getitem, node, index) for index in items] or [node]
    graph.output(tuple(results))
    return graph
