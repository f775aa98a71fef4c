"""Bias in the GEMM's epilogue.

    before    gemm: f32[M, N] = te.gemm(a, e4m3[row], b, e4m3[row], f32, fast_accum=False)
              y: bf16[M, N] = te.add_bias(gemm, bias, bf16)
    after     y: bf16[M, N] = te.gemm(a, e4m3[row], b, e4m3[row], bf16, fast_accum=False, bias=bias)

Both add in fp32 before the one rounding: bit-equal, in every format.
"""

from __future__ import annotations

from torch.fx import Graph, Node

from te_dynamo.dialect.gemm import Gemm, add_bias, gemm
from te_dynamo.passes.dialect.graph import call_like, calls


def fuse_gemm_bias(graph: Graph) -> int:
    """A GEMM + te.add_bias -> the GEMM with its bias."""
    fired = 0
    for node in calls(graph, add_bias):
        product, bias, out_dtype = node.args
        if not (isinstance(product, Node) and product.target is gemm and len(product.users) == 1):
            continue
        asked = Gemm.of(product)
        if asked.bias is not None or asked.addend is not None:
            continue
        biased = call_like(graph, gemm, asked._replace(bias=bias, out_dtype=out_dtype), node)
        node.replace_all_uses_with(biased)
        graph.erase_node(node)
        graph.erase_node(product)
        fired += 1
    return fired
