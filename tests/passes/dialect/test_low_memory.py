"""The option "low_memory", on by default: fewer bytes at a step's peak, the same bits."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from expecttest import assert_expected_inline
from helpers.models.gated_models import INNER, TOKENS, WIDTH, Gated, GateUpMLP, WideMLP
from helpers.models.snapshot_models import (
    Block,
    GeluMLP,
    SwigluMLP,
    capture_training,
    compiled_run,
    kernels_everywhere,
    launches,
)
from helpers.slow import EXHAUSTIVE
from torch import Tensor, nn
from torch.fx import Graph
from torch.utils.checkpoint import checkpoint

from te_dynamo.errors import InvalidOptionError
from te_dynamo.options import Options
from te_dynamo.passes.dialect.live_memory import peak_bytes
from te_dynamo.recipe import Float8BlockScaling, Float8RowwiseScaling, MXFP8BlockScaling, Recipe
from te_dynamo.testing import capture_on_fake_cuda, graph_diff, graph_text

OTHERS = (Float8BlockScaling(), MXFP8BlockScaling(), MXFP8BlockScaling(scale_block=128), Float8RowwiseScaling())
"""Recipes whose columnwise copies are no transposition of the rows."""


@pytest.fixture(autouse=True)
def no_caches() -> Iterator[None]:
    with torch._inductor.config.patch(force_disable_caches=True):
        yield


def lowered_backward(model: type[nn.Module], *shape: int, **options: object) -> Graph:
    with kernels_everywhere():
        graphs = capture_on_fake_cuda(
            lambda: model().bfloat16(),
            lambda device: (torch.empty(*shape, dtype=torch.bfloat16, device=device, requires_grad=True),),
            options=options,
        )
        text = graph_text(graphs.graph("lower.backward"))
    assert "clone" not in text
    return graphs.graph("lower.backward")


def test_backward_graph() -> None:
    """The columnwise copy of the gated gradients is made between the two products; down's weight gradient comes first."""
    graphs = capture_training(SwigluMLP, (256, 64), "cpu", low_memory=True)
    kernels = [line for line in graphs["backward"].splitlines() if "= te." in line]
    assert_expected_inline(
        "\n".join(kernels),
        """\
quantize_1: (f8e5m2[256, 64], f8e5m2[64, 256], f32[1]) = te.quantize(tangents_1, e5m2[row+column])
gemm: bf16[64, 128] = te.gemm([quantize_1[1], quantize_1[2]], e5m2[column], [gated_quantize[1], gated_quantize[2]], e4m3[column], bf16, fast_accum=False)
gemm_1: bf16[256, 128] = te.gemm([quantize_1[0], quantize_1[2]], e5m2[row], [quantize[1], quantize[2]], e4m3[column], bf16, fast_accum=False)
gated_backward_quantize: (f8e5m2[256, 256], f32[2]) = te.gated_backward_quantize(gemm_1, slice, slice_1, 'silu', e5m2[row], keep_output=False, stacked=True)
gemm_2: bf16[256, 64] = te.gemm([gated_backward_quantize[0], gated_backward_quantize[1]], e5m2[row], [quantize_stacked[1], quantize_stacked[2]], e4m3[column], bf16, fast_accum=False, along='K', segments=[128, 128])
transpose: f8e5m2[256, 256] = te.transpose(gated_backward_quantize[0])
gemm_3: bf16[256, 64] = te.gemm([transpose, gated_backward_quantize[1]], e5m2[column], [rms_norm_quantize[2], rms_norm_quantize[3]], e4m3[column], bf16, fast_accum=False, along='M', segments=[128, 128])""",
    )


def test_backward_graph_with_scales_of_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the peak both gradients are written in 16 bits, and quantized when gate and up are gone."""
    monkeypatch.setattr("te_dynamo.passes.dialect.low_memory.FEWEST_BYTES", 0)
    texts = [
        capture_training(SwigluMLP, (256, 64), "cpu", recipe="float8_block_scaling", low_memory=low)["backward"]
        for low in (False, True)
    ]
    assert_expected_inline(
        graph_diff(*texts),
        """\
--- before
+++ after
@@ -15,13 +15,15 @@
 view: f32[256, 1] = input
 tangents_1: bf16[256, 64] = input
 quantize_3: (f8e4m3[256, 64], f32[1, 256], f8e4m3[64, 256], f32[2, 64]) = te.quantize(tangents_1, e4m3 1x128[row+column])
+gemm_8: bf16[64, 128] = te.gemm([quantize_3[2], quantize_3[3]], e4m3 1x128[column], [gated_quantize[2], gated_quantize[3]], e4m3 1x128[column], bf16, fast_accum=False)
 gemm_2: bf16[256, 128] = te.gemm([quantize_3[0], quantize_3[1]], e4m3 1x128[row], [quantize_2[2], quantize_2[3]], e4m3 128x128[column], bf16, fast_accum=False)
-gemm_3: bf16[64, 128] = te.gemm([quantize_3[2], quantize_3[3]], e4m3 1x128[column], [gated_quantize[2], gated_quantize[3]], e4m3 1x128[column], bf16, fast_accum=False)
-gated_backward_quantize: (f8e4m3[256, 128], f32[1, 256], f8e4m3[128, 256], f32[2, 128], f8e4m3[256, 128], f32[1, 256], f8e4m3[128, 256], f32[2, 128]) = te.gated_backward_quantize(gemm_2, gemm, gemm_1, 'silu', e4m3 1x128[row+column], keep_output=False)
-gemm_4: bf16[256, 64] = te.gemm([gated_backward_quantize[4], gated_backward_quantize[5]], e4m3 1x128[row], [quantize_1[2], quantize_1[3]], e4m3 128x128[column], bf16, fast_accum=False)
-gemm_5: bf16[128, 64] = te.gemm([gated_backward_quantize[6], gated_backward_quantize[7]], e4m3 1x128[column], [rms_norm_quantize[3], rms_norm_quantize[4]], e4m3 1x128[column], bf16, fast_accum=False)
-gemm_6: bf16[256, 64] = te.gemm([gated_backward_quantize[0], gated_backward_quantize[1]], e4m3 1x128[row], [quantize[2], quantize[3]], e4m3 128x128[column], bf16, fast_accum=False)
-gemm_7: bf16[128, 64] = te.gemm([gated_backward_quantize[2], gated_backward_quantize[3]], e4m3 1x128[column], [rms_norm_quantize[3], rms_norm_quantize[4]], e4m3 1x128[column], bf16, fast_accum=False)
+gated_backward: (bf16[256, 128], bf16[256, 128]) = te.gated_backward(gemm_2, gemm, gemm_1, 'silu')
+quantize_4: (f8e4m3[256, 128], f32[1, 256], f8e4m3[128, 256], f32[2, 128]) = te.quantize(gated_backward[0], e4m3 1x128[row+column])
+quantize_5: (f8e4m3[256, 128], f32[1, 256], f8e4m3[128, 256], f32[2, 128]) = te.quantize(gated_backward[1], e4m3 1x128[row+column])
+gemm_9: bf16[128, 64] = te.gemm([quantize_5[2], quantize_5[3]], e4m3 1x128[column], [rms_norm_quantize[3], rms_norm_quantize[4]], e4m3 1x128[column], bf16, fast_accum=False)
+gemm_4: bf16[256, 64] = te.gemm([quantize_5[0], quantize_5[1]], e4m3 1x128[row], [quantize_1[2], quantize_1[3]], e4m3 128x128[column], bf16, fast_accum=False)
+gemm_5: bf16[128, 64] = te.gemm([quantize_4[2], quantize_4[3]], e4m3 1x128[column], [rms_norm_quantize[3], rms_norm_quantize[4]], e4m3 1x128[column], bf16, fast_accum=False)
+gemm_6: bf16[256, 64] = te.gemm([quantize_4[0], quantize_4[1]], e4m3 1x128[row], [quantize[2], quantize[3]], e4m3 128x128[column], bf16, fast_accum=False)
 add: bf16[256, 64] = aten.add(gemm_4, gemm_6)
 to: f32[256, 64] = add.to(f32)
 to_1: f32[256, 64] = x.to(f32)
@@ -37,4 +39,4 @@
 sub: f32[256, 64] = aten.sub(mul_1, mul_4)
 mul_5: f32[256, 64] = aten.mul(view, sub)
 to_4: bf16[256, 64] = mul_5.to(bf16)
-return to_3, to_4, gemm_7, gemm_5, gemm_3
+return to_3, to_4, gemm_5, gemm_9, gemm_8""",
    )


@pytest.mark.one_fast_case
@pytest.mark.parametrize(
    ("model", "shape", "codegen"),
    [
        (SwigluMLP, (32, 64), "eager"),
        (Gated, (32, 64), "eager"),
        (GeluMLP, (19, 64), "eager"),
        pytest.param(Block, (2, 16, 64), "eager", marks=pytest.mark.slow),
        pytest.param(SwigluMLP, (32, 64), "inductor", marks=pytest.mark.slow),
        pytest.param(GeluMLP, (19, 64), "inductor", marks=pytest.mark.slow),
        pytest.param(Gated, (32, 64), "inductor", marks=EXHAUSTIVE),
        pytest.param(Block, (2, 16, 64), "inductor", marks=EXHAUSTIVE),
    ],
)
def test_every_bit_is_the_same(model: type[nn.Module], shape: tuple[int, ...], codegen: str) -> None:
    check_bits(model, shape, codegen=codegen)


@pytest.mark.one_fast_case
@pytest.mark.parametrize("model", [SwigluMLP, Gated])
@pytest.mark.parametrize("recipe", OTHERS, ids=str)
def test_every_bit_is_the_same_with_other_scales(
    model: type[nn.Module], recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("te_dynamo.passes.dialect.low_memory.FEWEST_BYTES", 0)
    check_bits(model, (32, 64), codegen="eager", recipe=recipe)


def check_bits(model: type[nn.Module], shape: tuple[int, ...], **options: object) -> None:
    x = torch.randn(*shape, dtype=torch.bfloat16)
    expected, actual = (compiled_run(model, {**options, "low_memory": low})(x).gradients for low in (False, True))
    for name, gradient in expected.items():
        assert torch.equal(actual[name], gradient), name


@pytest.mark.slow
def test_what_the_caller_owns_is_not_written() -> None:
    graph = lowered_backward(Gated, 32, 64, low_memory=True)
    lines = launches(graph_text(graph)).splitlines()
    assert "produce_write_kernel -> data, scale_inv" in lines
    assert "transpose_kernel -> transpose" in lines


@pytest.mark.slow
def test_peak_of_a_gated_mlp_is_below_bf16s() -> None:
    hidden, activation, weight = (2 * a * b for a, b in ((TOKENS, WIDTH), (TOKENS, INNER), (WIDTH, INNER)))
    # Where Inductor computes dgate and dup: gate, up and their gradients, one of these in dact's place; the norm's output
    # and the weight gradient of down. 1.59 GiB with the module, as measured on an H200 (64 times these bytes).
    bf16 = 4 * activation + hidden + weight
    graphs = [
        lowered_backward(WideMLP, TOKENS, WIDTH, low_memory=value, save_weights="quantized") for value in (False, True)
    ]
    assert "gated_backward_rows_kernel -> dy, scale_inv" in launches(graph_text(graphs[1])).splitlines()
    with_columns_early, low = map(peak_bytes, graphs)
    # gate, up and dact; x, the weights of gate and up columnwise; rowwise and columnwise codes of dgate and dup; and dw
    assert with_columns_early == pytest.approx(3 * activation + hidden / 2 + weight + 2 * activation + weight, rel=1e-3)
    # At down's dgrad, which writes dact: gate, up; x, all three weights columnwise; dy rowwise; the weight gradient of down
    assert low == pytest.approx(3 * activation + hidden + 1.5 * weight + weight, rel=1e-3)
    assert low < bf16 < with_columns_early


@pytest.mark.slow
def test_one_linear_for_gate_and_up_has_the_peak_of_two() -> None:
    one, two = (lowered_backward(model, TOKENS, WIDTH, low_memory=True) for model in (GateUpMLP, WideMLP))
    assert "gated_backward_rows_kernel -> dy, scale_inv" in launches(graph_text(one)).splitlines()
    assert peak_bytes(one) == pytest.approx(peak_bytes(two), rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["dynamic", "checkpoint"])
def test_other_graphs_write_into_dy_too(how: str) -> None:
    class Checkpointed(Block):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x, use_reentrant=False)

    def inputs(device: str) -> tuple[Tensor]:
        x = torch.empty(3, 16, 64, dtype=torch.bfloat16, device=device, requires_grad=True)
        if how == "dynamic":
            torch._dynamo.mark_dynamic(x, 0)
        return (x,)

    model = Checkpointed if how == "checkpoint" else Block
    with kernels_everywhere():
        graphs = capture_on_fake_cuda(lambda: model().bfloat16(), inputs)
        text = graph_text(graphs.graph("lower.backward"))
    assert "gated_backward_rows_kernel -> dy, scale_inv" in launches(text).splitlines()


def test_option_is_a_bool() -> None:
    with pytest.raises(InvalidOptionError, match="'low_memory' takes True or False, got 1"):
        Options.parse({"low_memory": 1})
    assert Options.parse().low_memory and not Options.parse({"low_memory": False}).low_memory
