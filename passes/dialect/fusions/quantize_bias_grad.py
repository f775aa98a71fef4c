"""The bias gradient, a sum over columns, in the pass over dy that finds its amax.

    before    db: f32[N] = te.bias_grad(dy)
              q: (f8e5m2[M, N], f8e5m2[N, M], f32[1]) = te.quantize(dy, e5m2[row+column])
    after     q: (f32[N], f8e5m2[M, N], f8e5m2[N, M], f32[1]) = te.quantize_bias_grad(dy, e5m2[row+column])

dy is read twice in place of three times. The quantized buffers are bit-equal. The sum is in fp32, in another order. If Inductor's own code
writes dy, that code finds the amax too, and lowering makes two operations of it again.
"""

from __future__ import annotations

from torch.fx import Graph, Node

from te_dynamo.dialect.gemm import bias_grad
from te_dynamo.dialect.quantize import quantize_bias_grad
from te_dynamo.passes.dialect.fusions.producer import quantize_of, take_over
from te_dynamo.passes.dialect.graph import call_like, calls, read_item


def fuse_quantize_bias_grad(graph: Graph) -> int:
    """te.bias_grad + te.quantize of one tensor -> one operation."""
    fired = 0
    for node in calls(graph, bias_grad):
        dy = node.args[0]
        assert isinstance(dy, Node)
        quantized = quantize_of(dy)
        if quantized is None or not quantized.args[1].one_scale:  # type: ignore[union-attr]
            continue
        first = min(node, quantized)
        fused = call_like(graph, quantize_bias_grad, (dy, quantized.args[1]), first)
        take_over(graph, fused, 1, quantized)
        read_item(fused, 0, [node])
        fired += 1
    return fired
