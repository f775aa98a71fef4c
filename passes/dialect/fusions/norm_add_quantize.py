"""The residual stream's addition in the kernel of the norm that reads it.

    before    h: bf16[M, K] = aten.add(x, attention)
              rms: (f32[M], f8e4m3[M, K], f8e4m3[K, M], f32[1])
                  = te.rms_norm_quantize(h, weight, eps, ..., e4m3[row+column], keep_output=False)
    after     rms: (bf16[M, K], f32[M], f8e4m3[M, K], f8e4m3[K, M], f32[1])
                  = te.add_rms_norm_quantize(x, attention, weight, eps, ..., e4m3[row+column], keep_output=False)

h is written once, for the residual stream and for backward, and not read again before the norm. te.layer_norm is fused in the same way.

One operand may be narrower: under autocast a linear's bf16 is added to a residual stream in fp32. The sum of two in fp32 is not fused
where its norm is rounded to 16 bits: the kernel has no registers for that.

Both operands of the sum must be in memory anyway: inputs, results of te operations and of torch's own products, and tensors that somebody
else reads too. An operand that Inductor would compute inside the addition, such as a dropout, would have to be written for this fusion.
In backward, a norm's gradient and the residual's gradient that is added to it are aten operations: Inductor makes one kernel of them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from te_dynamo.dialect.memory import is_in_memory
from te_dynamo.dialect.norm import (
    add_layer_norm_quantize,
    add_rms_norm_quantize,
    layer_norm_quantize,
    rms_norm_quantize,
)
from te_dynamo.passes.dialect.graph import call_like, calls, is_plain_sum, item_users, read_item

_FUSED = {rms_norm_quantize: add_rms_norm_quantize, layer_norm_quantize: add_layer_norm_quantize}


def fuse_norm_add_quantize(graph: Graph) -> int:
    """aten.add + te.rms_norm_quantize or te.layer_norm_quantize -> one operation."""
    fired = 0
    for node in calls(graph, *_FUSED):
        addition: Any = node.args[0]
        if not (is_plain_sum(addition, promotes=True) and all(is_in_memory(operand) for operand in addition.args)):
            continue
        if is_plain_sum(addition) and any(isinstance(arg, torch.dtype) for arg in node.args):
            continue
        parameters = [arg for arg in node.args[1:] if isinstance(arg, Node)]
        if any(addition < parameter for parameter in parameters):
            continue  # computed after the addition, where h may be needed already
        fused = call_like(graph, _FUSED[node.target], (*addition.args, *node.args[1:]), addition)
        for index, readers in item_users(node).items():
            read_item(fused, 1 + index, readers)
        graph.erase_node(node)
        read_item(fused, 0, [addition])
        fired += 1
    return fired
