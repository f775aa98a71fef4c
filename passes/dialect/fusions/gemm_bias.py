"""Bias in the GEMM's epilogue.

    before    gemm: f32[M, N] = te.gemm(a, a_scale_inv, b, b_scale_inv, None, f32, fast_accum=False)
              y: bf16[M, N] = te.add_bias(gemm, bias, bf16)
    after     y: bf16[M, N] = te.gemm(a, a_scale_inv, b, b_scale_inv, bias, bf16, fast_accum=False)

Both add in fp32 before the one rounding: bit-equal. te.gemm_block, te.gemm_mxfp8, te.gemm_nvfp4 and te.gemm_stacked take their bias in the same way.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from te_dynamo.dialect.gemm import add_bias
from te_dynamo.dialect.multiply import GEMMS
from te_dynamo.dialect.stacked import gemm_stacked
from te_dynamo.passes.dialect.graph import call_like, calls

__all__ = ["fuse_gemm_bias"]

_GEMMS = (*GEMMS, gemm_stacked)


def fuse_gemm_bias(graph: Graph) -> int:
    """A GEMM + te.add_bias -> the GEMM with its bias."""
    fired = 0
    for node in calls(graph, add_bias):
        product, bias, out_dtype = node.args
        if not (isinstance(product, Node) and product.target in _GEMMS and len(product.users) == 1):
            continue
        assert isinstance(product.target, torch._ops.OpOverload)
        names = [argument.name for argument in product.target._schema.arguments]
        arguments: dict[str, Any] = dict(zip(names, product.args, strict=True))
        if arguments["bias"] is not None:
            continue
        arguments |= {"bias": bias, "out_dtype": out_dtype}
        node.replace_all_uses_with(call_like(graph, product.target, tuple(arguments.values()), node))
        graph.erase_node(node)
        graph.erase_node(product)
        fired += 1
    return fired
