"""graph_diff: what changed alone, whatever the numbers in names."""

from __future__ import annotations

import torch
from expecttest import assert_expected_inline
from torch import nn

import te_dynamo
from te_dynamo.testing import graph_diff


def forward(fusions: bool | list[str]) -> str:
    model = nn.Sequential(nn.RMSNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)).bfloat16()
    with te_dynamo.capture() as graphs, torch.no_grad():
        torch._dynamo.reset()
        options = {"codegen": "eager", "fusions": fusions}
        torch.compile(model, backend="te", options=options)(torch.randn(16, 32).bfloat16())
    return graphs["inference"]


def test_what_a_fusion_changed() -> None:
    assert_expected_inline(
        graph_diff(forward(False), forward(["fuse_norm_quantize"])),
        """\
--- before
+++ after
@@ -4,10 +4,9 @@
 1.bias: bf16[64] = input
 3.weight: bf16[32, 64] = input
 3.bias: bf16[32] = input
-rms_norm: (bf16[16, 32], f32[16]) = te.rms_norm(args_0, 0.weight, 1.1920928955078125e-07, cast_before_weight=False, zero_centered=False)
-quantize: (f8e4m3[16, 32], f32[1]) = te.quantize(rms_norm[0], e4m3[row])
+rms_norm_quantize: (f32[16], f8e4m3[16, 32], f32[1]) = te.rms_norm_quantize(args_0, 0.weight, 1.1920928955078125e-07, cast_before_weight=False, zero_centered=False, quantizer=e4m3[row], keep_output=False)
 quantize_1: (f8e4m3[64, 32], f32[1]) = te.quantize(1.weight, e4m3[row])
-gemm: f32[16, 64] = te.gemm([quantize[0], quantize[1]], e4m3[row], [quantize_1[0], quantize_1[1]], e4m3[row], f32, fast_accum=False)
+gemm: f32[16, 64] = te.gemm([rms_norm_quantize[1], rms_norm_quantize[2]], e4m3[row], [quantize_1[0], quantize_1[1]], e4m3[row], f32, fast_accum=False)
 add_bias: bf16[16, 64] = te.add_bias(gemm, 1.bias, bf16)
 activation: bf16[16, 64] = te.activation(add_bias, 'gelu')
 quantize_2: (f8e4m3[16, 64], f32[1]) = te.quantize(activation, e4m3[row])""",
    )


def test_equal_graphs_have_no_difference() -> None:
    graph = torch.fx.symbolic_trace(lambda x: torch.relu(x) + 1)
    assert graph_diff(graph, graph.graph) == ""
    text = "a = input\nrelu = torch.relu(a)\nrelu_1 = torch.relu(relu)\nreturn relu_1"
    assert graph_diff(text, text.replace("relu_1", "relu_5")) == ""


def test_a_new_value_takes_no_name_of_the_other_graph() -> None:
    before = "x = input\nsin = torch.sin(x)\ncos = torch.cos(sin)\nsin_1 = torch.sin(cos)\nreturn sin_1"
    after = "x = input\nsin = torch.sin(x)\nsin_1 = torch.sin(sin)\ncos = torch.cos(sin_1)\nsin_2 = torch.sin(cos)\nreturn sin_2"
    assert_expected_inline(
        graph_diff(before, after),
        """\
--- before
+++ after
@@ -1,5 +1,6 @@
 x = input
 sin = torch.sin(x)
-cos = torch.cos(sin)
+sin_2 = torch.sin(sin)
+cos = torch.cos(sin_2)
 sin_1 = torch.sin(cos)
 return sin_1""",
    )
