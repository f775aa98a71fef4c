"""SwiGLU's two gradients written in FP8 as one tensor, where gate and up are the halves of one linear's output.

    before    d: (bf16[M, K], bf16[M, K]) = te.gated_backward(dh, gate, up, 'silu')
              grad: bf16[M, 2K] = aten.cat([d[0], d[1]], 1)
              q: (f8e5m2[M, 2K], f8e5m2[2K, M], f32[1]) = te.quantize(grad, e5m2[row+column])
    after     q: (f8e5m2[M, 2K], f8e5m2[2K, M], f32[1])
                  = te.gated_backward_quantize_halves(dh, gate, up, 'silu', e5m2[row+column], keep_output=False, gate_first=True)

Both have one scale, because the linear has one gradient. gate_first is False where up is the first half. If something else reads the gradient
too, such as the sum for a bias, it is also written in its own precision.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from te_dynamo.dialect.gated import gated_backward, gated_backward_quantize_halves
from te_dynamo.passes.dialect.fusions.producer import fuse_producer, quantize_of
from te_dynamo.passes.dialect.graph import calls, item_users

_cat = torch.ops.aten.cat.default


def fuse_gated_backward_quantize_halves(graph: Graph) -> int:
    """te.gated_backward + aten.cat of both gradients + te.quantize -> one operation."""
    fired = 0
    for node in calls(graph, gated_backward):
        joined = _joined(node)
        quantized = None if joined is None else quantize_of(joined[0])
        if joined is None or quantized is None:
            continue
        grad, gradients = joined
        gate_first = gradients[0].args[1] == 0
        fuse_producer(node, gated_backward_quantize_halves, [grad], [quantized], node.args, (gate_first,))
        fired += 1
    return fired


def _joined(node: Node) -> tuple[Node, list[Node]] | None:
    """(the aten.cat along columns of the node's two results, the results as they lie in it), if nothing else reads either."""
    results = item_users(node)
    if any(len(results.get(index, ())) != 1 for index in (0, 1)):
        return None
    gradients = [results[index][0] for index in (0, 1)]
    (reader, *others) = dict.fromkeys(user for gradient in gradients for user in gradient.users)
    if others or reader.target is not _cat:
        return None
    parts: Any = reader.args[0]
    dim: Any = reader.args[1] if len(reader.args) > 1 else reader.kwargs.get("dim", 0)
    last = reader.meta["val"].dim() - 1
    if dim not in (last, -1) or list(parts) not in (gradients, gradients[::-1]):
        return None
    return reader, list(parts)
