"""Each backward fusion by itself: what it changes of a graph."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from expecttest import assert_expected_inline
from helpers.graphs.differences import changes
from helpers.graphs.graph_builder import E5M2, Builder, te
from torch import fx

from te_dynamo.passes.dialect.fuser import fuse
from te_dynamo.quantized.quantizers import MXFP8Quantizer
from te_dynamo.testing import fake_cuda, graph_text

DY = (32, 64)


@pytest.fixture(autouse=True)
def fake() -> Iterator[None]:
    with fake_cuda():
        yield


def changed(graph: fx.Graph, name: str) -> str:
    """By the fusion of that name, which must fire."""
    before = graph_text(graph)
    assert [fired for fired, _ in fuse(graph, "backward", (name,))] == [name]
    assert fuse(graph, "backward", (name,)) == []
    return changes(before, graph_text(graph))


def quantized(b: Builder, dy: fx.Node) -> list[fx.Node]:
    return b.read(b.call(te.quantize.default, dy, E5M2), 0, 1, 2)


@pytest.mark.parametrize("first", ["sum", "quantize"])
def test_quantize_bias_grad(first: str) -> None:
    """Whichever of the two stands first, the fused operation stands there."""
    b = Builder(DY)
    if first == "sum":
        sums = b.call(te.bias_grad.default, b.inputs[0])
        graph = b.returns(sums, *quantized(b, b.inputs[0]))
    else:
        buffers = quantized(b, b.inputs[0])
        graph = b.returns(b.call(te.bias_grad.default, b.inputs[0]), *buffers)
    text = changed(graph, "fuse_quantize_bias_grad")
    if first == "sum":
        assert_expected_inline(
            text,
            """\
@@ -2,3 +2,2 @@
-bias_grad: f32[64] = te.bias_grad(x0)
-quantize: (f8e5m2[32, 64], f8e5m2[64, 32], f32[1]) = te.quantize(x0, e5m2[row+column])
-return bias_grad, quantize[0], quantize[1], quantize[2]
+quantize_bias_grad: (f32[64], f8e5m2[32, 64], f8e5m2[64, 32], f32[1]) = te.quantize_bias_grad(x0, e5m2[row+column])
+return quantize_bias_grad[0], quantize_bias_grad[1], quantize_bias_grad[2], quantize_bias_grad[3]""",
        )
    graph.lint()
    assert len(graph.find_nodes(op="call_function", target=te.quantize_bias_grad.default)) == 1


def test_activation_backward_quantize() -> None:
    b = Builder(DY, DY)
    dx = b.call(te.activation_backward.default, *b.inputs, "gelu")
    graph = b.returns(b.call(te.bias_grad.default, dx), *quantized(b, dx))
    assert_expected_inline(
        changed(graph, "fuse_activation_backward_quantize"),
        """\
@@ -3,4 +3,2 @@
-activation_backward: bf16[32, 64] = te.activation_backward(x0, x1, 'gelu')
-bias_grad: f32[64] = te.bias_grad(activation_backward)
-quantize: (f8e5m2[32, 64], f8e5m2[64, 32], f32[1]) = te.quantize(activation_backward, e5m2[row+column])
-return bias_grad, quantize[0], quantize[1], quantize[2]
+activation_backward_quantize: (f32[64], f8e5m2[32, 64], f8e5m2[64, 32], f32[1]) = te.activation_backward_quantize(x0, x1, 'gelu', e5m2[row+column], keep_output=False, bias_grad=True)
+return activation_backward_quantize[0], activation_backward_quantize[1], activation_backward_quantize[2], activation_backward_quantize[3]""",
    )


def test_gated_backward_quantize() -> None:
    b = Builder(DY, DY, DY)
    gradients = b.read(b.call(te.gated_backward.default, *b.inputs, "silu"), 0, 1)
    graph = b.returns(*(buffer for gradient in gradients for buffer in quantized(b, gradient)))
    assert_expected_inline(
        changed(graph, "fuse_gated_backward_quantize"),
        """\
@@ -4,4 +4,2 @@
-gated_backward: (bf16[32, 64], bf16[32, 64]) = te.gated_backward(x0, x1, x2, 'silu')
-quantize: (f8e5m2[32, 64], f8e5m2[64, 32], f32[1]) = te.quantize(gated_backward[0], e5m2[row+column])
-quantize_1: (f8e5m2[32, 64], f8e5m2[64, 32], f32[1]) = te.quantize(gated_backward[1], e5m2[row+column])
-return quantize[0], quantize[1], quantize[2], quantize_1[0], quantize_1[1], quantize_1[2]
+gated_backward_quantize: (f8e5m2[32, 64], f8e5m2[64, 32], f32[1], f8e5m2[32, 64], f8e5m2[64, 32], f32[1]) = te.gated_backward_quantize(x0, x1, x2, 'silu', e5m2[row+column], keep_output=False)
+return gated_backward_quantize[0], gated_backward_quantize[1], gated_backward_quantize[2], gated_backward_quantize[3], gated_backward_quantize[4], gated_backward_quantize[5]""",
    )


def test_gated_backward_quantize_halves() -> None:
    """The sum of a bias gradient reads the gradient as it is."""
    b = Builder(DY, DY, DY)
    dgate, dup = b.read(b.call(te.gated_backward.default, *b.inputs, "silu"), 0, 1)
    grad = b.call(torch.ops.aten.cat.default, [dup, dgate], 1)
    graph = b.returns(b.call(te.bias_grad.default, grad), *quantized(b, grad))
    assert_expected_inline(
        changed(graph, "fuse_gated_backward_quantize_halves"),
        """\
@@ -4,5 +4,3 @@
-gated_backward: (bf16[32, 64], bf16[32, 64]) = te.gated_backward(x0, x1, x2, 'silu')
-cat: bf16[32, 128] = aten.cat([gated_backward[1], gated_backward[0]], 1)
-bias_grad: f32[128] = te.bias_grad(cat)
-quantize: (f8e5m2[32, 128], f8e5m2[128, 32], f32[1]) = te.quantize(cat, e5m2[row+column])
-return bias_grad, quantize[0], quantize[1], quantize[2]
+gated_backward_quantize_halves: (bf16[32, 128], f8e5m2[32, 128], f8e5m2[128, 32], f32[1]) = te.gated_backward_quantize_halves(x0, x1, x2, 'silu', e5m2[row+column], keep_output=True, gate_first=False)
+bias_grad: f32[128] = te.bias_grad(gated_backward_quantize_halves[0])
+return bias_grad, gated_backward_quantize_halves[1], gated_backward_quantize_halves[2], gated_backward_quantize_halves[3]""",
    )


def test_an_activations_gradient_takes_the_bias_gradient_first() -> None:
    """All fusions together: one operation writes everything."""
    b = Builder(DY, DY)
    dx = b.call(te.activation_backward.default, *b.inputs, "gelu")
    graph = b.returns(b.call(te.bias_grad.default, dx), *quantized(b, dx))
    assert [name for name, _ in fuse(graph, "backward")] == ["fuse_activation_backward_quantize"]


def test_a_bias_gradient_beside_another_format_or_two_stays() -> None:
    b = Builder((128, 64))
    sums = b.call(te.bias_grad.default, b.inputs[0])
    other = b.read(b.call(te.quantize.default, b.inputs[0], MXFP8Quantizer()), 0)
    assert fuse(b.returns(sums, *other), "backward") == []
    b = Builder(DY)
    sums = b.call(te.bias_grad.default, b.inputs[0])
    rows = b.read(b.call(te.quantize.default, b.inputs[0], E5M2.with_usage(columnwise=False)), 0)
    assert fuse(b.returns(sums, *rows, *quantized(b, b.inputs[0])), "backward") == []
