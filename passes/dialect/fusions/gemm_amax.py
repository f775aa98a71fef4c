"""A GEMM of a few rows that knows the amax of its result, which the next linear quantizes: that saves a launch and a pass.

    before    y: bf16[M, N] = te.gemm(a, e4m3[row], b, e4m3[row], bf16, fast_accum=False)
              q: (f8e4m3[M, N], f32[1]) = te.quantize(y, e4m3[row])
    after     y: (bf16[M, N], f32[512]) = te.gemm_amax(a, e4m3[row], b, e4m3[row], bf16, fast_accum=False)
              q: (f8e4m3[M, N], f32[1]) = te.quantize_with_amax(y[0], e4m3[row], y[1])

Bit-equal. The fusion is for at most 64 rows, a number that is known when compiling. There a launch takes as long as what it computes, and the
GEMM reads hardly more than the weight. Larger GEMMs leave their amax to a pass. Where the kernel does not run, te.gemm_amax does what stood
there before.
"""

from __future__ import annotations

from torch.fx import Graph

from te_dynamo.dialect.gemm import Gemm, choice_for, gemm, gemm_amax
from te_dynamo.dialect.quantize import quantize_with_amax
from te_dynamo.passes.dialect.fusions.producer import quantize_of
from te_dynamo.passes.dialect.graph import call_like, calls, getitem_after, read_item, replace_items


def fuse_gemm_amax(graph: Graph) -> int:
    """te.gemm of a few rows + te.quantize -> te.gemm_amax + te.quantize_with_amax."""
    fired = 0
    for node in calls(graph, gemm):
        quantized = quantize_of(node)
        asked = Gemm.of(node)
        if quantized is None or not (asked.a_quantizer.one_scale and asked.of_a_linear):
            continue
        if not choice_for(node, "amax").fused:
            continue
        fused = call_like(graph, gemm_amax, asked[:7], node)  # a bias too, and nothing behind it
        read_item(fused, 0, [node])
        cast = call_like(graph, quantize_with_amax, (node, quantized.args[1], getitem_after(fused, 1)), quantized)
        replace_items(quantized, cast, {i: i for i in range(len(quantized.meta["val"]))})
        graph.erase_node(quantized)
        fired += 1
    return fired
