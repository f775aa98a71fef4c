"""Graphs of te operations, built a node at a time, for tests of single passes."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from te_dynamo.quantized.quantizers import Float8CurrentScalingQuantizer

te, aten = torch.ops.te, torch.ops.aten

BOTH = Float8CurrentScalingQuantizer()

ROWS, COLUMNS = BOTH.with_usage(columnwise=False), BOTH.with_usage(rowwise=False)

E5M2 = Float8CurrentScalingQuantizer(fp8_format="e5m2")


class Builder:
    """A graph written by hand, with fake results."""

    def __init__(self, *shapes: tuple[int, ...]) -> None:
        self.graph = fx.Graph()
        self.inputs = [self.graph.placeholder(f"x{number}") for number in range(len(shapes))]
        for node, shape in zip(self.inputs, shapes, strict=True):
            node.meta["val"] = torch.empty(*shape, dtype=torch.bfloat16, device="cuda")

    def call(self, target: Any, *args: Any, **meta: Any) -> fx.Node:
        node = self.graph.call_function(target, args)
        node.meta.update(meta, val=target(*fx.map_arg(args, lambda n: n.meta["val"])))
        return node

    def read(self, node: fx.Node, *indices: int) -> list[fx.Node]:
        return [self.call(operator.getitem, node, index) for index in indices]

    def returns(self, *nodes: fx.Node) -> fx.Graph:
        self.graph.output(nodes)
        return self.graph
