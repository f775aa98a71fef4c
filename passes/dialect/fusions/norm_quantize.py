"""A norm that writes its result in FP8, row and column copy in one kernel.

    before    rms: (bf16[M, K], f32[M]) = te.rms_norm(x, weight, eps, ...)
              q: (f8e4m3[M, K], f8e4m3[K, M], f32[1]) = te.quantize(rms[0], e4m3[row+column])
    after     rms: (f32[M], f8e4m3[M, K], f8e4m3[K, M], f32[1]) = te.rms_norm_quantize(x, weight, eps, ..., e4m3[row+column], keep_output=False)

The norm's bf16 result is neither written nor read, unless someone else reads it (keep_output=True).
"""

from __future__ import annotations

from torch.fx import Graph

from te_dynamo.dialect.norm import layer_norm, layer_norm_quantize, rms_norm, rms_norm_quantize
from te_dynamo.dialect.norm_modulate import layer_norm_modulate, layer_norm_modulate_quantize
from te_dynamo.passes.dialect.fusions.producer import other_readers, quantize_of, take_over
from te_dynamo.passes.dialect.graph import call_like, calls, item_users, read_item

__all__ = ["fuse_norm_quantize"]

_FUSED = {
    rms_norm: rms_norm_quantize,
    layer_norm: layer_norm_quantize,
    layer_norm_modulate: layer_norm_modulate_quantize,
}


def fuse_norm_quantize(graph: Graph) -> int:
    """te.rms_norm, te.layer_norm or te.layer_norm_modulate + te.quantize -> one operation."""
    fired = 0
    for node in calls(graph, *_FUSED):
        results = item_users(node)
        outputs = results.get(0, [])
        quantized = quantize_of(outputs[0]) if len(outputs) == 1 else None
        if quantized is None:
            continue
        keep_output = bool(other_readers(outputs[0], quantized))
        fused = call_like(graph, _FUSED[node.target], (*node.args, quantized.args[1], keep_output), node)
        statistics = len(node.meta["val"]) - 1
        take_over(graph, fused, keep_output + statistics, quantized)
        for index, readers in results.items():
            if index > 0:
                read_item(fused, keep_output + index - 1, readers)
        if keep_output:
            read_item(fused, 0, outputs)
        else:
            graph.erase_node(outputs[0])
        graph.erase_node(node)
        fired += 1
    return fired
