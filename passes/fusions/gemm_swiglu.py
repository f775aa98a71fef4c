"""The GEMM of gate and up that finds the amax of silu(gate) * up while it multiplies, which saves a pass over both.

    before    y: bf16[M, 2N] = te.gemm_stacked(x.data, x.scale_inv, w.data, w.scale_inv, bf16, True, "N", [N, N])
              gate = y[:, :N];  up = y[:, N:]
              h: (f8e4m3[M, N], f8e4m3[N, M], f32[1]) = te.swiglu_quantize(gate, up, e4m3[row+column], keep_output=False)
    after     y: (bf16[M, 2N], f32[512]) = te.gemm_swiglu(x.data, x.scale_inv, w.data, w.scale_inv, True, gate=0)
              gate = y[0][:, :N];  up = y[0][:, N:]
              h: (f8e4m3[M, N], f8e4m3[N, M], f32[1]) = te.swiglu_quantize(gate, up, e4m3[row+column], keep_output=False, amax=y[1])

Bit-equal. gate=1 where up comes first in the stack. Where the kernel that can do so does not run (small products, a CPU),
te.gemm_swiglu is what stood there before.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from te_dynamo.ops.gemm_swiglu import gemm_swiglu
from te_dynamo.ops.stacked import gemm_stacked
from te_dynamo.ops.swiglu import swiglu_quantize
from te_dynamo.passes.graph import RESHAPES, call_like, calls, getitem_after, read_item, replace_items

__all__ = ["fuse_gemm_swiglu"]

_slice = torch.ops.aten.slice.Tensor


def fuse_gemm_swiglu(graph: Graph) -> int:
    """te.gemm_stacked of gate and up + te.swiglu_quantize -> te.gemm_swiglu + te.swiglu_quantize with its amax."""
    fired = 0
    for node in calls(graph, swiglu_quantize):
        if len(node.args) > 4:
            continue
        (gate_of, gate), (up_of, up) = (_half(value) for value in node.args[:2])
        if gate_of is None or gate_of is not up_of or {gate, up} != {0, 1}:
            continue
        a, a_scale, b, b_scale, _, fast_accum, _, _ = gate_of.args
        fused = call_like(graph, gemm_swiglu, (a, a_scale, b, b_scale, fast_accum, gate), gate_of)
        read_item(fused, 0, [gate_of])
        amax = getitem_after(fused, 1)
        quantized = call_like(graph, swiglu_quantize, (*node.args, amax), node)
        replace_items(node, quantized, {i: i for i in range(len(node.meta["val"]))})
        graph.erase_node(node)
        fired += 1
    return fired


def _half(value: object) -> tuple[Node | None, int]:
    """(the bf16 te.gemm_stacked of two equal segments along N of which a node is one half, which one)."""
    while isinstance(value, Node) and value.target in RESHAPES:
        value = value.args[0]
    if not (isinstance(value, Node) and value.target is _slice):
        return None, 0
    product, dim, first, end = (*value.args, *[None] * 4)[:4]
    if not (isinstance(product, Node) and product.target is gemm_stacked):
        return None, 0
    *_, out_dtype, _, along, segments = product.args
    if out_dtype != torch.bfloat16 or along != "N" or len(segments) != 2 or segments[0] != segments[1]:
        return None, 0
    if dim != 1 or (first, end) not in ((0, segments[0]), (segments[0], sum(segments))):
        return None, 0
    return product, int(first > 0)
