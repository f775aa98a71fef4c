"""The gradient of an activation written in FP8, row and column copy in one kernel, with the bias gradient beside it.

    before    dx: bf16[M, K] = te.activation_backward(dh, x, 'gelu')
              db: f32[K] = te.bias_grad(dx)
              q: (f8e5m2[M, K], f8e5m2[K, M], f32[1]) = te.quantize(dx, e5m2[row+column])
    after     dx: (f32[K], f8e5m2[M, K], f8e5m2[K, M], f32[1])
                  = te.activation_backward_quantize(dh, x, 'gelu', e5m2[row+column], keep_output=False, bias_grad=True)

For SwiGLU, both gradients (of gate and up) in one:

    before    d: (bf16[M, K], bf16[M, K]) = te.swiglu_backward(dh, gate, up)
              q = te.quantize(d[0], e5m2[row+column]);  q_1 = te.quantize(d[1], e5m2[row+column])
    after     d = te.swiglu_backward_quantize(dh, gate, up, e5m2[row+column], keep_output=False)
"""

from __future__ import annotations

from torch.fx import Graph

from te_dynamo.ops.activation import activation_backward, activation_backward_quantize
from te_dynamo.ops.gemm import bias_grad
from te_dynamo.ops.swiglu import swiglu_backward, swiglu_backward_quantize
from te_dynamo.passes.fusions.producer import other_readers, quantize_of, take_over
from te_dynamo.passes.graph import call_like, calls, item_users, read_item

__all__ = ["fuse_activation_backward_quantize", "fuse_swiglu_backward_quantize"]


def fuse_activation_backward_quantize(graph: Graph) -> int:
    """te.activation_backward + te.quantize (+ te.bias_grad) -> one operation."""
    fired = 0
    for node in calls(graph, activation_backward):
        quantized = quantize_of(node)
        if quantized is None:
            continue
        sums = next((user for user in node.users if user.target is bias_grad), None)
        keep_output = bool(other_readers(node, quantized, sums))
        args = (*node.args, quantized.args[1], keep_output, sums is not None)
        fused = call_like(graph, activation_backward_quantize, args, node)
        take_over(graph, fused, keep_output + (sums is not None), quantized)
        if sums is not None:
            read_item(fused, int(keep_output), [sums])
        if keep_output:
            read_item(fused, 0, [node])
        else:
            graph.erase_node(node)
        fired += 1
    return fired


def fuse_swiglu_backward_quantize(graph: Graph) -> int:
    """te.swiglu_backward + te.quantize of both gradients by equal quantizers -> one operation."""
    fired = 0
    for node in calls(graph, swiglu_backward):
        results = item_users(node)
        if any(len(results.get(index, ())) != 1 for index in (0, 1)):
            continue
        gradients = [results[index][0] for index in (0, 1)]
        quantized = [quantize_of(gradient) for gradient in gradients]
        if quantized[0] is None or quantized[1] is None or quantized[0].args[1] != quantized[1].args[1]:
            continue
        keep_output = any(other_readers(g, q) for g, q in zip(gradients, quantized, strict=True))
        fused = call_like(graph, swiglu_backward_quantize, (*node.args, quantized[0].args[1], keep_output), node)
        position = take_over(graph, fused, 2 * keep_output, quantized[0])
        take_over(graph, fused, position, quantized[1])
        for index, gradient in enumerate(gradients):
            if keep_output:
                read_item(fused, index, [gradient])
            else:
                graph.erase_node(gradient)
        graph.erase_node(node)
        fired += 1
    return fired
