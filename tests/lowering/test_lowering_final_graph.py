"""What Inductor writes code from is the same whether launches reach its passes as writes in place or functional."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from helpers.models.snapshot_models import MODELS, kernels_everywhere, shape_for
from torch import fx

from te_dynamo.lowering import trace
from te_dynamo.testing import capture_on_fake_cuda

MOVABLE = {
    "aten.empty.memory_format", "aten.slice.Tensor", "aten.reshape.default", "aten.view.default", "aten.permute.default",
    "<built-in function getitem>",
}  # fmt: skip
"""Allocations and views: nothing depends on where between their operands and their first reader they stand."""


def in_order(graph: fx.Graph) -> list[fx.Node]:
    """The nodes in the graph's order, movable ones in front of their first reader."""
    order: dict[fx.Node, None] = {}

    def visit(node: fx.Node) -> None:
        for operand in node.all_input_nodes:
            if operand not in order:
                visit(operand)
        order[node] = None

    for node in graph.nodes:
        if str(node.target) not in MOVABLE:
            visit(node)
    return list(order)


def described(gm: fx.GraphModule) -> list[Any]:
    """Every node by number: target, arguments, the value's layout; of a launch also the kernel and its constants."""
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

    numbers: dict[fx.Node, int] = {}
    lines = []
    for node in in_order(gm.graph):
        numbers[node] = len(numbers)
        kwargs = dict(node.kwargs)
        if "kernel_idx" in kwargs:
            kernel: Any = kernel_side_table.get_kernel(kwargs["kernel_idx"])
            while hasattr(kernel, "configs"):
                kwargs["configs"], kernel = str(kernel.configs[0]), kernel.fn
            kwargs["kernel_idx"] = kernel.__name__
            kwargs["constant_args_idx"] = kernel_side_table.get_constant_args(kwargs["constant_args_idx"])
        value = node.meta.get("val")
        layout = (value.shape, value.stride(), value.dtype) if isinstance(value, torch.Tensor) else None
        args, kwargs = fx.map_arg((node.args, kwargs), lambda n: numbers[n])
        lines.append((node.op, node.op == "call_function" and str(node.target), args, kwargs, layout))
    return lines


def final_graphs(model: str) -> list[list[Any]]:
    """Forward and backward after all of Inductor's passes."""
    from torch._inductor import compile_fx

    passes, found = compile_fx._recursive_post_grad_passes, []

    def noting(gm: fx.GraphModule, *args: Any, **kwargs: Any) -> None:
        passes(gm, *args, **kwargs)
        found.append(described(gm))

    def inputs(device: str) -> tuple[torch.Tensor, ...]:
        return (torch.empty(shape_for(MODELS[model], 32), dtype=torch.bfloat16, device=device, requires_grad=True),)

    torch._dynamo.reset()
    with mock.patch.object(compile_fx, "_recursive_post_grad_passes", noting), kernels_everywhere():
        capture_on_fake_cuda(lambda: MODELS[model]().bfloat16(), inputs)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gelu", "block"])
def test_the_final_graph_is_that_of_functional_launches(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = final_graphs(model)
    monkeypatch.setattr(trace, "_writes", lambda node: True)
    expected = final_graphs(model)
    assert len(found) == 2 and found == expected
    assert any("kernel_idx" in str(line) for line in found[0])
