"""The gradient of an activation written in FP8, row and column copy in one kernel, with the bias gradient beside it.

    before    dx: bf16[M, K] = te.activation_backward(dh, x, 'gelu')
              db: f32[K] = te.bias_grad(dx)
              q: (f8e5m2[M, K], f8e5m2[K, M], f32[1]) = te.quantize(dx, e5m2[row+column])
    after     dx: (f32[K], f8e5m2[M, K], f8e5m2[K, M], f32[1])
                  = te.activation_backward_quantize(dh, x, 'gelu', e5m2[row+column], keep_output=False, bias_grad=True)

For SwiGLU, both gradients (of gate and up) in one:

    before    d: (bf16[M, K], bf16[M, K]) = te.gated_backward(dh, gate, up, 'silu')
              q = te.quantize(d[0], e5m2[row+column]);  q_1 = te.quantize(d[1], e5m2[row+column])
    after     d = te.gated_backward_quantize(dh, gate, up, 'silu', e5m2[row+column], keep_output=False)

and where one GEMM reads both (shared_input.py):

    before    q = te.quantize_stacked([d[0], d[1]], e5m2[row+column], True)
    after     d = te.gated_backward_quantize(dh, gate, up, 'silu', e5m2[row+column], keep_output=False, stacked=True)
"""

from __future__ import annotations

from torch.fx import Graph, Node

from te_dynamo.dialect.activation import activation_backward, activation_backward_quantize
from te_dynamo.dialect.gated import gated_backward, gated_backward_quantize
from te_dynamo.dialect.gemm import bias_grad
from te_dynamo.dialect.stacked import quantize_stacked
from te_dynamo.passes.dialect.fusions.producer import fuse_producer, quantize_of
from te_dynamo.passes.dialect.graph import calls, item_users


def fuse_activation_backward_quantize(graph: Graph) -> int:
    """te.activation_backward + te.quantize (+ te.bias_grad) -> one operation."""
    fired = 0
    for node in calls(graph, activation_backward):
        quantized = quantize_of(node)
        if quantized is None:
            continue
        sums = next((user for user in node.users if user.target is bias_grad), None)
        others = [[sums]] if sums is not None else []
        fuse_producer(node, activation_backward_quantize, [node], [quantized], node.args, (sums is not None,), others)
        fired += 1
    return fired


def fuse_gated_backward_quantize(graph: Graph) -> int:
    """te.gated_backward + te.quantize of both gradients by equal quantizers, or of their stack -> one operation."""
    fired = 0
    for node in calls(graph, gated_backward):
        results = item_users(node)
        if any(len(results.get(index, ())) != 1 for index in (0, 1)):
            continue
        gradients = [results[index][0] for index in (0, 1)]
        quantized = _quantized_together(gradients)
        if quantized is None:
            continue
        stacked = quantized[0].target is quantize_stacked
        fuse_producer(node, gated_backward_quantize, gradients, quantized, node.args, (stacked,))
        fired += 1
    return fired


def _quantized_together(gradients: list[Node]) -> list[Node] | None:
    """The te.quantize of each gradient, by equal quantizers, or the one te.quantize_stacked of both."""
    stacks = [u for u in gradients[0].users if u.target is quantize_stacked and u.args[1].one_scale]  # type: ignore[union-attr]
    if len(stacks) == 1 and stacks[0].args[0] == gradients and stacks[0].args[2]:
        return stacks if not any(quantize_of(gradient) for gradient in gradients) else None
    quantized = [one for gradient in gradients if (one := quantize_of(gradient)) is not None]
    if len(quantized) < 2 or quantized[0].args[1] != quantized[1].args[1]:
        return None
    return quantized
