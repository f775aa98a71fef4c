"""The GEMM of gate and up that finds the amax of f(gate) * up while it multiplies, which saves a pass over both.

    before    y: bf16[M, 2N] = te.gemm(x, e4m3[row], w, e4m3[row], bf16, fast_accum=False, along='N', segments=[N, N])
              gate = y[:, :N];  up = y[:, N:]
              h: (f8e4m3[M, N], f8e4m3[N, M], f32[1]) = te.gated_quantize(gate, up, 'silu', e4m3[row+column], keep_output=False)
    after     y: (bf16[M, 2N], f32[512]) = te.gemm_gated(x, e4m3[row], w, e4m3[row], fast_accum=False, gate=0, kind='silu')
              gate = y[0][:, :N];  up = y[0][:, N:]
              h: (f8e4m3[M, N], f8e4m3[N, M], f32[1]) = te.gated_quantize(gate, up, 'silu', e4m3[row+column], keep_output=False, amax=y[1])

Bit-equal. For per-tensor scales alone: no other product finds an amax, and no other format asks for one. gate is 1 where up comes first in
the stack. Where the kernel that can do so does not run (small products, a CPU), te.gemm_gated does what stood there before.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from te_dynamo.dialect.gated import BOUNDED_KINDS, gated_quantize
from te_dynamo.dialect.gemm import Gemm, gemm, gemm_gated
from te_dynamo.dialect.memory import before_reshapes
from te_dynamo.passes.dialect.graph import call_like, calls, getitem_after, read_item, replace_items

_slice = torch.ops.aten.slice.Tensor


def fuse_gemm_gated(graph: Graph) -> int:
    """te.gemm of a stack of gate and up + te.gated_quantize -> te.gemm_gated + te.gated_quantize with its amax."""
    fired = 0
    for node in calls(graph, gated_quantize):
        if len(node.args) > 5 or node.args[2] not in BOUNDED_KINDS:
            continue
        gate, up = (_half(value) for value in node.args[:2])
        if gate is None or up is None or gate[0] is not up[0] or gate[1] == up[1]:
            continue
        product = gate[0]
        if not (node.args[3].one_scale and Gemm.of(product).a_quantizer.one_scale):  # type: ignore[union-attr]
            continue
        operands, fast_accum = product.args[:4], product.args[5]
        fused = call_like(graph, gemm_gated, (*operands, fast_accum, gate[1], node.args[2]), product)
        read_item(fused, 0, [product])
        amax = getitem_after(fused, 1)
        quantized = call_like(graph, gated_quantize, (*node.args, amax), node)
        replace_items(node, quantized, {i: i for i in range(len(node.meta["val"]))})
        graph.erase_node(node)
        fired += 1
    return fired


def _half(value: Any) -> tuple[Node, int] | None:
    """(the bf16 te.gemm of two equal segments along N, without a bias, of which a node is one half, which one), if it is that."""
    value = before_reshapes(value)
    if not (isinstance(value, Node) and value.target is _slice and len(value.args) == 4):
        return None
    product: Any = value.args[0]
    if not (isinstance(product, Node) and product.target is gemm):
        return None
    asked = Gemm.of(product)
    adds = asked.bias is not None or asked.addend is not None
    if adds or asked.out_dtype != torch.bfloat16 or asked.along != "N":
        return None
    width, *others = asked.segments
    if others != [width]:
        return None
    parts: list[Any] = [(1, 0, width), (1, width, 2 * width)]
    return (product, parts.index(value.args[1:])) if value.args[1:] in parts else None
