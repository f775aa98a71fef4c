"""Tokens of expert parallelism, quantized by the rank that has them before they go to their experts' ranks: one byte per value travels.

    before    g: bf16[R, K] = _c10d_functional.all_to_all_single(x, received, sent, group)     x: bf16[S, K], sent: the rows of each of P ranks
              w: bf16[R, K] = _c10d_functional.wait_tensor(g)
              y: bf16[R, K] = aten.index(w, [order])                                           by expert; order: of aten.sort
              q: (f8e4m3[R, K], f8e4m3[K, R], f32[1]) = te.quantize(y, e4m3[row+column])
    after     a: i32[P] = te.amax_bits_of_parts(x, sent)
              o: i32[1] = _c10d_functional.reduce_scatter_tensor(a, 'max', P, group)           of all that this rank receives
              e: i32[P] = _c10d_functional.all_gather_into_tensor(o, P, group)                 and of what each does
              c: (f8e4m3[S, K], f32[1]) = te.quantize_parts(x, sent, e, o, e4m3[row])
              g: u8[R, K] = _c10d_functional.all_to_all_single(c[0], received, sent, group)
              y: u8[R, K] = aten.index(_c10d_functional.wait_tensor(g), [order])
              q[0] -> y, q[1] -> te.transpose(y), q[2] -> c[1]

Every bit is the same: what a rank receives has one scale, by the largest of the amaxes of its parts. In forward the way to the experts
becomes so, in backward that of the gradients to them. The two ways back end in sums, and stay in their own precision.

The joint graph is fused, because backward's own graph does not show what its order is of. What stays in its own precision, and why
`explain` says, is as gather_quantize.py says of all-gathers. Indices between the two have to be an order of all tokens, by torch.argsort:
others may leave some out, and with them the largest.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from te_dynamo.dialect.quantize import amax_bits_of_parts, quantize_parts
from te_dynamo.passes.dialect.collectives.gather_quantize import (
    ALL_TO_ALL,
    Gathered,
    gather_own,
    gathered_quantizations,
    reason_to_leave,
)
from te_dynamo.passes.dialect.graph import call_like, getitem_after

_aten, _c10d = torch.ops.aten, torch.ops._c10d_functional


def fuse_all_to_all_quantize(graph: Graph) -> int:
    """An all-to-all + te.quantize -> te.amax_bits_of_parts, te.quantize_parts, an all-to-all of bytes, te.transpose."""
    fired = 0
    for exchanged in list(gathered_quantizations(graph, ALL_TO_ALL)):
        if not reason_to_leave(exchanged):
            gather_own(graph, exchanged, *_quantize_for_receivers(graph, exchanged))
            fired += 1
    return fired


def _quantize_for_receivers(graph: Graph, exchanged: Gathered) -> tuple[Node, Node]:
    """(codes as bytes in the shape of what the rank sends, fp32 [1] scale_inv of what it receives), made before the all-to-all."""
    like = exchanged.gather
    part, _, sent, group = like.args
    ranks = len(sent)  # type: ignore[arg-type]

    def call(target: Any, *args: Any) -> Node:
        return call_like(graph, target, args, like)

    bits = call(amax_bits_of_parts, part, sent)
    own = call(_c10d.wait_tensor.default, call(_c10d.reduce_scatter_tensor.default, bits, "max", ranks, group))
    of_all = call(_c10d.wait_tensor.default, call(_c10d.all_gather_into_tensor.default, own, ranks, group))
    amaxes = [call(_aten.view.dtype, largest, torch.float32) for largest in (of_all, own)]
    quantizer: Any = exchanged.quantize.args[1]
    cast = call(quantize_parts, part, sent, *amaxes, quantizer.with_usage(True, False))
    scale_inv, codes = getitem_after(cast, 1), getitem_after(cast, 0)
    return call(_aten.view.dtype, codes, torch.uint8), scale_inv
