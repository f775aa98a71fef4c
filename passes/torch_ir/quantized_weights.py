"""te.linear of a weight that is a QuantizedTensor reads its buffers: it is neither dequantized nor quantized again.

    before    y = te.linear(x, weight, bias, config)[0]                       weight: a QuantizedTensor, a cast of one under autocast
    after     data = weight._data;  scale_inv = weight._scale_inv
              y = te.linear_with_workspace(x, weight, bias, config, [data, scale_inv])[0]

The weight stays an operand, for its gradient. Of rows alone backward makes the columns (te_dynamo/dialect/multiply.py).
"""

from __future__ import annotations

import dataclasses

import torch
from torch import fx

from te_dynamo.passes.torch_ir.match.mutation import reads_through
from te_dynamo.passes.torch_ir.match.values import emit, emit_getitem, quantized_of, replace

_te = torch.ops.te


def read_buffers(gm: fx.GraphModule) -> None:
    """Rewrites in place, bodies too."""
    for body in gm.modules():
        if isinstance(body, fx.GraphModule):
            for node in body.graph.find_nodes(op="call_function", target=_te.linear.default):
                _rewrite(body.graph, node)


def _rewrite(graph: fx.Graph, node: fx.Node) -> None:
    x, weight, bias, config = node.args
    stored, casts = weight, []
    while stored.op == "call_method" and stored.target == "to":  # type: ignore[union-attr]
        casts.append(stored)
        stored = stored.args[0]  # type: ignore[union-attr]
    held = quantized_of(stored)
    if held is None or not reads_through(node, *casts):
        return
    quantizer = held.quantizer
    if getattr(quantizer, "input_amax", 0.0):  # the matcher has read it
        quantizer = dataclasses.replace(quantizer, input_amax=0.0)  # type: ignore[call-arg]
    config = dataclasses.replace(config, weight_quantizer=quantizer)  # type: ignore[type-var]
    with graph.inserting_before(node):
        buffers = [emit(graph, getattr, (stored, f"_{name}"), node) for name in held.named_buffers()]
        new = emit(graph, _te.linear_with_workspace.default, (x, weight, bias, config, buffers), node)
        for item in list(node.users):
            replace(item, emit_getitem(graph, new, item.args[1]))  # type: ignore[arg-type]
            graph.erase_node(item)
    graph.erase_node(node)
