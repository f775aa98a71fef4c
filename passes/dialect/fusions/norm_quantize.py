"""A norm that writes its result in FP8, row and column copy in one kernel.

    before    rms: (bf16[M, K], f32[M]) = te.rms_norm(x, weight, eps, ...)
              q: (f8e4m3[M, K], f8e4m3[K, M], f32[1]) = te.quantize(rms[0], e4m3[row+column])
    after     rms: (f32[M], f8e4m3[M, K], f8e4m3[K, M], f32[1]) = te.rms_norm_quantize(x, weight, eps, ..., e4m3[row+column], keep_output=False)

The norm's bf16 result is neither written nor read, unless someone else reads it (keep_output=True).

Under autocast the norm of an fp32 x gives bf16 itself (dtype=bf16). Where somebody reads its result in fp32, it is rounded in between:

    before    layer: (f32[M, K], f32[M], f32[M]) = te.layer_norm(x, weight, bias, eps)
              cast: bf16[M, K] = layer[0].to(bf16)
              q: (f8e4m3[M, K], f8e4m3[K, M], f32[1]) = te.quantize(cast, e4m3[row+column])
    after     layer: (f32[M, K], ..., f8e4m3[M, K], f8e4m3[K, M], f32[1])
                  = te.layer_norm_quantize(x, weight, bias, eps, e4m3[row+column], keep_output=True, quantized_dtype=bf16)
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from te_dynamo.dialect.memory import CASTS
from te_dynamo.dialect.producers import NORMS
from te_dynamo.passes.dialect.fusions.producer import other_readers, quantize_of, take_over
from te_dynamo.passes.dialect.graph import call_like, calls, item_users, read_item

__all__ = ["fuse_norm_quantize"]


def fuse_norm_quantize(graph: Graph) -> int:
    """te.rms_norm, te.layer_norm or te.layer_norm_modulate + te.quantize -> one operation."""
    fired = 0
    for node in calls(graph, *NORMS):
        results = item_users(node)
        outputs = results.get(0, [])
        quantized = quantize_of(outputs[0]) if len(outputs) == 1 else None
        rounded = _rounded_for_quantize(outputs[0]) if len(outputs) == 1 and quantized is None else None
        quantized = quantized or (rounded and quantize_of(rounded))
        if quantized is None:
            continue
        keep_output = bool(other_readers(outputs[0], rounded or quantized))
        fused = call_like(graph, NORMS[node.target], _arguments(node, quantized, keep_output, rounded), node)
        statistics = len(node.meta["val"]) - 1
        take_over(graph, fused, keep_output + statistics, quantized)
        if rounded is not None:
            graph.erase_node(rounded)
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


def _rounded_for_quantize(y: Node) -> Node | None:
    """The one cast of a norm's fp32 result that nothing but a te.quantize reads."""
    casts = [
        user for user in y.users if user.target in CASTS and len(user.users) == 1 and quantize_of(user) is not None
    ]
    return casts[0] if len(casts) == 1 and y.meta["val"].dtype == torch.float32 else None


def _arguments(node: Node, quantized: Node, keep_output: bool, rounded: Node | None) -> tuple[Any, ...]:
    """Those of the fused operation: the norm's dtype, where it is not x's, goes behind the quantizer."""
    assert isinstance(node.target, torch._ops.OpOverload)
    required = sum(not argument.has_default_value() for argument in node.target._schema.arguments)
    dtypes: tuple[Any, ...] = tuple(node.args[required:])
    if rounded is not None:
        dtypes = (*(dtypes or (None,)), rounded.meta["val"].dtype)
    return (*node.args[:required], quantized.args[1], keep_output, *dtypes)
