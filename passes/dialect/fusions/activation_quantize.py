"""An activation that writes its result in FP8, row and column copy in one kernel.

    before    h: bf16[M, K] = te.gated(gate, up, 'silu')
              q: (f8e4m3[M, K], f8e4m3[K, M], f32[1]) = te.quantize(h, e4m3[row+column])
    after     h: (f8e4m3[M, K], f8e4m3[K, M], f32[1]) = te.gated_quantize(gate, up, 'silu', e4m3[row+column], keep_output=False)

te.activation is fused in the same way.
"""

from __future__ import annotations

from torch.fx import Graph

from te_dynamo.dialect.producers import ACTIVATIONS
from te_dynamo.passes.dialect.fusions.producer import other_readers, quantize_of, take_over
from te_dynamo.passes.dialect.graph import call_like, calls, read_item

__all__ = ["fuse_activation_quantize"]


def fuse_activation_quantize(graph: Graph) -> int:
    """te.activation or te.gated + te.quantize -> one operation."""
    fired = 0
    for node in calls(graph, *ACTIVATIONS):
        quantized = quantize_of(node)
        if quantized is None:
            continue
        keep_output = bool(other_readers(node, quantized))
        fused = call_like(graph, ACTIVATIONS[node.target], (*node.args, quantized.args[1], keep_output), node)
        take_over(graph, fused, int(keep_output), quantized)
        if keep_output:
            read_item(fused, 0, [node])
        else:
            graph.erase_node(node)
        fired += 1
    return fired
