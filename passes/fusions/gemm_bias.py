"""Bias in the GEMM's epilogue.

    before    gemm: f32[M, N] = te.gemm(a, a_scale_inv, b, b_scale_inv, None, f32, fast_accum=True)
              y: bf16[M, N] = te.add_bias(gemm, bias, bf16)
    after     y: bf16[M, N] = te.gemm(a, a_scale_inv, b, b_scale_inv, bias, bf16, fast_accum=True)

Both add in fp32 before the one rounding: bit-equal.
"""

from __future__ import annotations

from torch.fx import Graph, Node

from te_dynamo.ops.gemm import add_bias, gemm
from te_dynamo.passes.graph import call_like, calls

__all__ = ["fuse_gemm_bias"]


def fuse_gemm_bias(graph: Graph) -> int:
    """te.gemm + te.add_bias -> te.gemm with its bias."""
    fired = 0
    for node in calls(graph, add_bias):
        product, bias, out_dtype = node.args
        if not (isinstance(product, Node) and product.target is gemm and len(product.users) == 1):
            continue
        a, a_scale_inv, b, b_scale_inv, no_bias, _, fast_accum = product.args
        if no_bias is not None:
            continue
        fused = call_like(graph, gemm, (a, a_scale_inv, b, b_scale_inv, bias, out_dtype, fast_accum), node)
        node.replace_all_uses_with(fused)
        graph.erase_node(node)
        graph.erase_node(product)
        fired += 1
    return fired
