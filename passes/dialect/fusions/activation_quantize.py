"""An activation that writes its result in FP8, row and column copy in one kernel.

    before    h: bf16[M, K] = te.gated(gate, up, 'silu')
              q: (f8e4m3[M, K], f8e4m3[K, M], f32[1]) = te.quantize(h, e4m3[row+column])
    after     h: (f8e4m3[M, K], f8e4m3[K, M], f32[1]) = te.gated_quantize(gate, up, 'silu', e4m3[row+column], keep_output=False)

te.activation is fused in the same way.
"""

from __future__ import annotations

from torch.fx import Graph

from te_dynamo.dialect.producers import ACTIVATIONS
from te_dynamo.passes.dialect.fusions.producer import fuse_producer, quantize_of
from te_dynamo.passes.dialect.graph import calls


def fuse_activation_quantize(graph: Graph) -> int:
    """te.activation or te.gated + te.quantize -> one operation."""
    fired = 0
    for node in calls(graph, *ACTIVATIONS):
        quantized = quantize_of(node)
        if quantized is None:
            continue
        fuse_producer(node, ACTIVATIONS[node.target], [node], [quantized], node.args)
        fired += 1
    return fired
