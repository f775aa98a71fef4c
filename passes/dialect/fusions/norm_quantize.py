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
from te_dynamo.passes.dialect.fusions.producer import fuse_producer, quantize_of
from te_dynamo.passes.dialect.graph import calls, item_users


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
        statistics = [results.get(index, []) for index in range(1, len(node.meta["val"]))]
        fuse_producer(node, NORMS[node.target], outputs, [quantized], *_arguments(node, rounded), statistics)
        fired += 1
    return fired


def _rounded_for_quantize(y: Node) -> Node | None:
    """The one cast of a norm's fp32 result that nothing but a te.quantize reads."""
    casts = [
        user for user in y.users if user.target in CASTS and len(user.users) == 1 and quantize_of(user) is not None
    ]
    return casts[0] if len(casts) == 1 and y.meta["val"].dtype == torch.float32 else None


def _arguments(node: Node, rounded: Node | None) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """(those of the norm, its dtype where it is not x's and that of what is quantized), the second behind the quantizer."""
    assert isinstance(node.target, torch._ops.OpOverload)
    required = sum(not argument.has_default_value() for argument in node.target._schema.arguments)
    dtypes: tuple[Any, ...] = tuple(node.args[required:])
    if rounded is not None:
        dtypes = (*(dtypes or (None,)), rounded.meta["val"].dtype)
    return node.args[:required], dtypes
