"""Each forward fusion by itself: what it changes of a graph."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from expecttest import assert_expected_inline
from helpers.graphs.differences import changes
from helpers.graphs.graph_builder import BOTH, ROWS, Builder, aten, te
from helpers.kernels.gemms import arguments
from torch import fx

from te_dynamo.passes.dialect.fuser import fuse
from te_dynamo.quantized.quantizers import NVFP4Quantizer
from te_dynamo.testing import fake_cuda, graph_text

X, WEIGHT = (32, 64), (64,)


@pytest.fixture(autouse=True)
def fake() -> Iterator[None]:
    with fake_cuda():
        yield


def changed(graph: fx.Graph, *names: str) -> str:
    """By the fusions of those names, which must fire."""
    before = graph_text(graph)
    assert [name for name, _ in fuse(graph, "forward", names)] == list(names)
    assert fuse(graph, "forward", names) == []
    return changes(before, graph_text(graph))


def normalized(b: Builder, x: fx.Node, quantizer: object = BOTH) -> list[fx.Node]:
    """RMSNorm of x with the weight that is the last input: [rstd, the buffers of y quantized]."""
    y, rstd = b.read(b.call(te.rms_norm.default, x, b.inputs[-1], 1e-5, False, False), 0, 1)
    return [rstd, *b.read(b.call(te.quantize.default, y, quantizer), 0, 1, 2)]


def test_norm_quantize() -> None:
    b = Builder(X, WEIGHT)
    assert_expected_inline(
        changed(b.returns(*normalized(b, b.inputs[0])), "fuse_norm_quantize"),
        """\
@@ -3,3 +3,2 @@
-rms_norm: (bf16[32, 64], f32[32]) = te.rms_norm(x0, x1, 1e-05, cast_before_weight=False, zero_centered=False)
-quantize: (f8e4m3[32, 64], f8e4m3[64, 32], f32[1]) = te.quantize(rms_norm[0], e4m3[row+column])
-return rms_norm[1], quantize[0], quantize[1], quantize[2]
+rms_norm_quantize: (f32[32], f8e4m3[32, 64], f8e4m3[64, 32], f32[1]) = te.rms_norm_quantize(x0, x1, 1e-05, cast_before_weight=False, zero_centered=False, quantizer=e4m3[row+column], keep_output=False)
+return rms_norm_quantize[0], rms_norm_quantize[1], rms_norm_quantize[2], rms_norm_quantize[3]""",
    )


def test_norm_add_quantize() -> None:
    """The sum is the residual stream: it is returned, and read by the norm."""
    b = Builder(X, X, WEIGHT)
    h = b.call(aten.add.Tensor, *b.inputs[:2])
    graph = b.returns(h, *normalized(b, h))
    assert_expected_inline(
        changed(graph, "fuse_norm_quantize", "fuse_norm_add_quantize"),
        """\
@@ -4,4 +4,2 @@
-add: bf16[32, 64] = aten.add(x0, x1)
-rms_norm: (bf16[32, 64], f32[32]) = te.rms_norm(add, x2, 1e-05, cast_before_weight=False, zero_centered=False)
-quantize: (f8e4m3[32, 64], f8e4m3[64, 32], f32[1]) = te.quantize(rms_norm[0], e4m3[row+column])
-return add, rms_norm[1], quantize[0], quantize[1], quantize[2]
+add_rms_norm_quantize: (bf16[32, 64], f32[32], f8e4m3[32, 64], f8e4m3[64, 32], f32[1]) = te.add_rms_norm_quantize(x0, x1, x2, 1e-05, cast_before_weight=False, zero_centered=False, quantizer=e4m3[row+column], keep_output=False)
+return add_rms_norm_quantize[0], add_rms_norm_quantize[1], add_rms_norm_quantize[2], add_rms_norm_quantize[3], add_rms_norm_quantize[4]""",
    )


def test_layer_norm_add_quantize() -> None:
    """Of a product's result; the norm's is read in both precisions."""
    b = Builder(X, (32, 16), (16, 64), WEIGHT)
    h = b.call(aten.add.Tensor, b.call(aten.mm.default, *b.inputs[1:3]), b.inputs[0])
    y, mean, rstd = b.read(b.call(te.layer_norm.default, h, b.inputs[3], b.inputs[3], 1e-5), 0, 1, 2)
    graph = b.returns(h, y, mean, rstd, *b.read(b.call(te.quantize.default, y, BOTH), 0, 1, 2))
    assert_expected_inline(
        changed(graph, "fuse_norm_quantize", "fuse_norm_add_quantize"),
        """\
@@ -6,4 +6,2 @@
-add: bf16[32, 64] = aten.add(mm, x0)
-layer_norm: (bf16[32, 64], f32[32], f32[32]) = te.layer_norm(add, x3, x3, 1e-05)
-quantize: (f8e4m3[32, 64], f8e4m3[64, 32], f32[1]) = te.quantize(layer_norm[0], e4m3[row+column])
-return add, layer_norm[0], layer_norm[1], layer_norm[2], quantize[0], quantize[1], quantize[2]
+add_layer_norm_quantize: (bf16[32, 64], bf16[32, 64], f32[32], f32[32], f8e4m3[32, 64], f8e4m3[64, 32], f32[1]) = te.add_layer_norm_quantize(mm, x0, x3, x3, 1e-05, e4m3[row+column], keep_output=True)
+return add_layer_norm_quantize[0], add_layer_norm_quantize[1], add_layer_norm_quantize[2], add_layer_norm_quantize[3], add_layer_norm_quantize[4], add_layer_norm_quantize[5], add_layer_norm_quantize[6]""",
    )


def test_activation_quantize() -> None:
    b = Builder(X, X)
    results = []
    for y in (b.call(te.activation.default, b.inputs[0], "gelu"), b.call(te.gated.default, *b.inputs, "silu")):
        results += b.read(b.call(te.quantize.default, y, BOTH), 0, 1, 2)
    assert_expected_inline(
        changed(b.returns(*results), "fuse_activation_quantize"),
        """\
@@ -3,5 +3,3 @@
-activation: bf16[32, 64] = te.activation(x0, 'gelu')
-gated: bf16[32, 64] = te.gated(x0, x1, 'silu')
-quantize: (f8e4m3[32, 64], f8e4m3[64, 32], f32[1]) = te.quantize(activation, e4m3[row+column])
-quantize_1: (f8e4m3[32, 64], f8e4m3[64, 32], f32[1]) = te.quantize(gated, e4m3[row+column])
-return quantize[0], quantize[1], quantize[2], quantize_1[0], quantize_1[1], quantize_1[2]
+activation_quantize: (f8e4m3[32, 64], f8e4m3[64, 32], f32[1]) = te.activation_quantize(x0, 'gelu', e4m3[row+column], keep_output=False)
+gated_quantize: (f8e4m3[32, 64], f8e4m3[64, 32], f32[1]) = te.gated_quantize(x0, x1, 'silu', e4m3[row+column], keep_output=False)
+return activation_quantize[0], activation_quantize[1], activation_quantize[2], gated_quantize[0], gated_quantize[1], gated_quantize[2]""",
    )


def gate_and_up(b: Builder, gate: int) -> fx.Node:
    """te.gated_quantize of the two parts of a stacked product, the gate's being that of the number."""
    x = b.read(b.call(te.quantize.default, b.inputs[0], BOTH), 0, 2)
    weights = b.read(b.call(te.quantize_stacked.default, b.inputs[1:], BOTH, False), 0, 2)
    y = b.call(te.gemm.default, *arguments(*x, *weights, None, torch.bfloat16, True, None, "N", [128, 128]))
    parts = [b.call(aten.view.default, b.call(aten.slice.Tensor, y, 1, n, n + 128), [4, 8, 128]) for n in (0, 128)]
    return b.call(te.gated_quantize.default, parts[gate], parts[1 - gate], "silu", BOTH, False)


def test_gemm_gated() -> None:
    """The gate is the second of the stack; backward reads it."""
    b = Builder(X, (128, 64), (128, 64))
    h = gate_and_up(b, 1)
    assert_expected_inline(
        changed(b.returns(*b.read(h, 0, 1, 2), h.args[0]), "fuse_gemm_gated"),
        """\
@@ -6,2 +6,2 @@
-gemm: bf16[32, 256] = te.gemm([quantize[0], quantize[2]], e4m3[row], [quantize_stacked[0], quantize_stacked[2]], e4m3[row], bf16, fast_accum=True, along='N', segments=[128, 128])
-slice: bf16[32, 128] = aten.slice(gemm, 1, 0, 128)
+gemm_gated: (bf16[32, 256], f32[512]) = te.gemm_gated([quantize[0], quantize[2]], e4m3[row], [quantize_stacked[0], quantize_stacked[2]], e4m3[row], fast_accum=True, gate=1, kind='silu')
+slice: bf16[32, 128] = aten.slice(gemm_gated[0], 1, 0, 128)
@@ -9 +9 @@
-slice_1: bf16[32, 128] = aten.slice(gemm, 1, 128, 256)
+slice_1: bf16[32, 128] = aten.slice(gemm_gated[0], 1, 128, 256)
@@ -11 +11 @@
-gated_quantize: (f8e4m3[32, 128], f8e4m3[128, 32], f32[1]) = te.gated_quantize(view_1, view, 'silu', e4m3[row+column], keep_output=False)
+gated_quantize: (f8e4m3[32, 128], f8e4m3[128, 32], f32[1]) = te.gated_quantize(view_1, view, 'silu', e4m3[row+column], keep_output=False, amax=gemm_gated[1])""",
    )


def test_a_product_of_which_the_gate_is_no_half_stays() -> None:
    """The gate on both sides; and a second result of a fused product, which there is one of."""
    b = Builder(X, (128, 64), (128, 64))
    h = gate_and_up(b, 0)
    other = b.call(te.gated_quantize.default, h.args[0], h.args[0], "silu", BOTH, False)
    graph = b.returns(*b.read(other, 0, 1, 2), *b.read(h, 0, 1, 2))
    assert fuse(graph, "forward", ("fuse_gemm_gated",)) == [("fuse_gemm_gated", 1)]
    assert [len(node.args) for node in graph.nodes if node.target is te.gated_quantize.default] == [6, 5]


def test_gemm_bias() -> None:
    b = Builder(X, (48, 64), (48,))
    operands = [b.read(b.call(te.quantize.default, x, BOTH), 0, 2) for x in b.inputs[:2]]
    product = b.call(te.gemm.default, *arguments(*operands[0], *operands[1], None, torch.float32, True))
    graph = b.returns(b.call(te.add_bias.default, product, b.inputs[2], torch.bfloat16))
    assert_expected_inline(
        changed(graph, "fuse_gemm_bias"),
        """\
@@ -6,3 +6,2 @@
-gemm: f32[32, 48] = te.gemm([quantize[0], quantize[2]], e4m3[row], [quantize_1[0], quantize_1[2]], e4m3[row], f32, fast_accum=True)
-add_bias: bf16[32, 48] = te.add_bias(gemm, x2, bf16)
-return add_bias
+gemm_1: bf16[32, 48] = te.gemm([quantize[0], quantize[2]], e4m3[row], [quantize_1[0], quantize_1[2]], e4m3[row], bf16, fast_accum=True, bias=x2)
+return gemm_1""",
    )


# ---- sums that stay


def other_shape(b: Builder) -> fx.Node:
    return b.call(aten.add.Tensor, b.inputs[0], b.call(aten.view.default, b.inputs[2], [1, 64]))


def other_dtype(b: Builder) -> fx.Node:
    wide = b.call(torch.ops.prims.convert_element_type.default, b.inputs[1], torch.float32)
    total = b.call(aten.add.Tensor, b.inputs[0], wide)
    return b.call(torch.ops.prims.convert_element_type.default, total, torch.bfloat16)


def scaled(b: Builder) -> fx.Node:
    node = b.call(aten.add.Tensor, *b.inputs[:2])
    node.kwargs = {"alpha": 2}
    return node


def computed_inside(b: Builder) -> fx.Node:
    """Inductor computes the product inside the addition."""
    return b.call(aten.add.Tensor, b.inputs[0], b.call(aten.mul.Tensor, b.inputs[1], b.inputs[1]))


def number(b: Builder) -> fx.Node:
    return b.call(aten.add.Tensor, b.inputs[0], 1.0)


def not_contiguous(b: Builder) -> fx.Node:
    return b.call(aten.add.Tensor, *(b.call(aten.permute.default, x, [1, 0]) for x in b.inputs[3:5]))


@pytest.mark.parametrize("make", [other_shape, other_dtype, scaled, computed_inside, number, not_contiguous])
def test_other_sums_stay(make) -> None:
    b = Builder(X, X, WEIGHT, (64, 32), (64, 32), WEIGHT)
    h = make(b)
    graph = b.returns(h, *normalized(b, h))
    assert [name for name, _ in fuse(graph, "forward")] == ["fuse_norm_quantize"]


def test_a_sum_stays_before_a_weight_that_is_computed_after_it() -> None:
    """What reads the sum in between would come before the fused operation."""
    b = Builder(X, X, WEIGHT)
    h = b.call(aten.add.Tensor, *b.inputs[:2])
    b.inputs.append(b.call(aten.mul.Tensor, b.inputs[2], b.inputs[2]))
    graph = b.returns(h, *normalized(b, h))
    assert [name for name, _ in fuse(graph, "forward")] == ["fuse_norm_quantize"]


def test_a_product_that_somebody_else_reads_is_in_memory() -> None:
    b = Builder(X, X, WEIGHT)
    product = b.call(aten.mul.Tensor, b.inputs[1], b.inputs[1])
    h = b.call(aten.add.Tensor, b.inputs[0], product)
    graph = b.returns(product, *normalized(b, h))
    assert [name for name, _ in fuse(graph, "forward")] == ["fuse_norm_quantize", "fuse_norm_add_quantize"]


def test_two_norms_of_one_sum_share_it() -> None:
    b = Builder(X, X, WEIGHT)
    h = b.call(aten.add.Tensor, *b.inputs[:2])
    graph = b.returns(*normalized(b, h), *normalized(b, h))
    fuse(graph, "forward")
    targets = [node.target for node in graph.nodes]
    assert targets.count(te.add_rms_norm_quantize.default) == targets.count(te.rms_norm_quantize.default) == 1
    assert aten.add.Tensor not in targets


def test_another_format_is_not_fused() -> None:
    b = Builder((128, 64), (128, 64), WEIGHT)
    h = b.call(aten.add.Tensor, *b.inputs[:2])
    assert fuse(b.returns(h, *normalized(b, h, NVFP4Quantizer())), "forward") == []


def test_gemm_amax() -> None:
    """Of 32 rows and a weight of 4 MB; a GEMM of more rows keeps the pass over its result."""
    b = Builder((32, 2048), (2048, 2048))
    x, w = (b.read(b.call(te.quantize.default, value, ROWS), 0, 1) for value in b.inputs)
    y = b.call(te.gemm.default, *arguments(*x, *w, None, torch.bfloat16, True))
    q = b.read(b.call(te.quantize.default, y, ROWS), 0, 1)
    assert_expected_inline(
        changed(b.returns(*q), "fuse_gemm_amax"),
        """\
@@ -5,3 +5,3 @@
-gemm: bf16[32, 2048] = te.gemm([quantize[0], quantize[1]], e4m3[row], [quantize_1[0], quantize_1[1]], e4m3[row], bf16, fast_accum=True)
-quantize_2: (f8e4m3[32, 2048], f32[1]) = te.quantize(gemm, e4m3[row])
-return quantize_2[0], quantize_2[1]
+gemm_amax: (bf16[32, 2048], f32[512]) = te.gemm_amax([quantize[0], quantize[1]], e4m3[row], [quantize_1[0], quantize_1[1]], e4m3[row], bf16, fast_accum=True)
+quantize_with_amax: (f8e4m3[32, 2048], f32[1]) = te.quantize_with_amax(gemm_amax[0], e4m3[row], gemm_amax[1])
+return quantize_with_amax[0], quantize_with_amax[1]""",
    )


@pytest.mark.parametrize("fast", [True, False])
def test_no_amax_of_many_rows(fast: bool) -> None:
    for rows, fired in ((32, 1), (128, 0)):
        b = Builder((rows, 2048), (2048, 2048))
        q = b.read(b.call(te.quantize.default, product(b, fast=fast), ROWS), 0, 1)
        assert fuse(b.returns(*q), "forward", ("fuse_gemm_amax",)) == [("fuse_gemm_amax", 1)] * fired


def test_gemm_amax_of_a_product_with_a_bias() -> None:
    b = Builder((32, 2048), (2048, 2048), (2048,))
    biased = b.call(te.add_bias.default, product(b, torch.float32), b.inputs[2], torch.bfloat16)
    graph = b.returns(*b.read(b.call(te.quantize.default, biased, ROWS), 0, 1))
    names = ("fuse_gemm_bias", "fuse_gemm_amax")
    assert fuse(graph, "forward", names) == [(name, 1) for name in names]
    assert "bias=x2" in graph_text(graph)


def product(b: Builder, out_dtype: torch.dtype = torch.bfloat16, last: int = 1, fast: bool = True) -> fx.Node:
    """te.gemm of the first input, [M, K], by another, [N, K], both quantized."""
    x, w = (b.read(b.call(te.quantize.default, b.inputs[i], ROWS), 0, 1) for i in (0, last))
    return b.call(te.gemm.default, *arguments(*x, *w, None, out_dtype, fast))


def test_gemm_add() -> None:
    """A residual sum in three dimensions, which the graph returns."""
    b = Builder(X, (64, 64), (4, 8, 64))
    y = b.call(aten.view.default, product(b), [4, 8, 64])
    assert_expected_inline(
        changed(b.returns(b.call(aten.add.Tensor, b.inputs[2], y)), "fuse_gemm_add"),
        """\
@@ -6 +6,2 @@
-gemm: bf16[32, 64] = te.gemm([quantize[0], quantize[1]], e4m3[row], [quantize_1[0], quantize_1[1]], e4m3[row], bf16, fast_accum=True)
+view_1: bf16[32, 64] = aten.view(x2, [32, 64])
+gemm: bf16[32, 64] = te.gemm([quantize[0], quantize[1]], e4m3[row], [quantize_1[0], quantize_1[1]], e4m3[row], bf16, fast_accum=True, addend=view_1)
@@ -8,2 +9 @@
-add: bf16[4, 8, 64] = aten.add(x2, view)
-return add
+return view""",
    )


def test_gemm_add_of_three_products() -> None:
    """The gradients of linears with one input: each but the first is added to those before, if the sum is written anyway."""
    b = Builder(X, (64, 64), (64, 64), (64, 64))
    total = b.call(aten.view.default, product(b), [4, 8, 64])
    for number in (2, 3):
        y = b.call(aten.view.default, product(b, last=number), [4, 8, 64])
        total = b.call(aten.add.Tensor, total, y)
    assert_expected_inline(
        changed(b.returns(total), "fuse_gemm_add"),
        """\
@@ -8 +7,0 @@
-view: bf16[4, 8, 64] = aten.view(gemm, [4, 8, 64])
@@ -11,3 +10 @@
-gemm_1: bf16[32, 64] = te.gemm([quantize_2[0], quantize_2[1]], e4m3[row], [quantize_3[0], quantize_3[1]], e4m3[row], bf16, fast_accum=True)
-view_1: bf16[4, 8, 64] = aten.view(gemm_1, [4, 8, 64])
-add: bf16[4, 8, 64] = aten.add(view, view_1)
+gemm_1: bf16[32, 64] = te.gemm([quantize_2[0], quantize_2[1]], e4m3[row], [quantize_3[0], quantize_3[1]], e4m3[row], bf16, fast_accum=True, addend=gemm)
@@ -16 +13 @@
-gemm_2: bf16[32, 64] = te.gemm([quantize_4[0], quantize_4[1]], e4m3[row], [quantize_5[0], quantize_5[1]], e4m3[row], bf16, fast_accum=True)
+gemm_2: bf16[32, 64] = te.gemm([quantize_4[0], quantize_4[1]], e4m3[row], [quantize_5[0], quantize_5[1]], e4m3[row], bf16, fast_accum=True, addend=gemm_1)
@@ -18,2 +15 @@
-add_1: bf16[4, 8, 64] = aten.add(add, view_2)
-return add_1
+return view_2""",
    )


def test_the_sum_before_a_norm_is_the_norms() -> None:
    b = Builder(X, (64, 64), X, WEIGHT)
    h = b.call(aten.add.Tensor, b.inputs[2], product(b))
    graph = b.returns(h, *normalized(b, h))
    assert [name for name, _ in fuse(graph, "forward")] == ["fuse_norm_quantize", "fuse_norm_add_quantize"]


def sums_that_stay(b: Builder, kind: str, fast: bool = True) -> list[fx.Node]:
    """What a graph returns that holds a GEMM and an addition that stay two nodes."""
    x, row = b.inputs[2:]
    y = product(b, torch.float32 if kind == "another dtype" else torch.bfloat16, fast=fast)
    if kind == "broadcast":
        return [b.call(aten.add.Tensor, y, row)]
    if kind == "read twice":
        return [b.call(aten.add.Tensor, x, y), y]
    if kind == "alpha":
        added = b.call(aten.add.Tensor, x, y)
        added.kwargs = {"alpha": 2.0}
        return [added]
    if kind == "an addend that Inductor computes":
        return [b.call(aten.add.Tensor, b.call(aten.relu.default, x), y)]
    if kind == "a sum that Inductor need not write":
        return [b.call(aten.relu.default, b.call(aten.add.Tensor, x, y))]
    if kind == "transposed":
        return [b.call(aten.add.Tensor, b.call(aten.t.default, y), b.call(aten.t.default, x))]
    return [b.call(aten.add.Tensor, x, y)]


STAY = ["another dtype", "broadcast", "read twice", "alpha", "an addend that Inductor computes", "transposed"]


@pytest.mark.parametrize("kind", [*STAY, "a sum that Inductor need not write"])
def test_sums_that_stay(kind: str) -> None:
    b = Builder(X, (64, 64), X, WEIGHT)
    assert fuse(b.returns(*sums_that_stay(b, kind)), "forward", ("fuse_gemm_add",)) == []


@pytest.mark.parametrize("fast", [True, False])
def test_a_large_product_adds_what_inductor_reads(fast: bool) -> None:
    """Its tensor cores multiply meanwhile; what is added must be in memory all the same."""
    for kind, fired in (("a sum that Inductor need not write", 1), ("an addend that Inductor computes", 0)):
        b = Builder((8192, 4096), (4096, 4096), (8192, 4096), (4096,))
        found = fuse(b.returns(*sums_that_stay(b, kind, fast)), "forward", ("fuse_gemm_add",))
        assert found == [("fuse_gemm_add", 1)] * fired
