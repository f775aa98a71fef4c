"""The weight gradient behind the reader of the input gradient, in checkpointed regions: fewer bytes at the peak, the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from expecttest import assert_expected_inline
from helpers.models.gated_models import TOKENS, WIDTH, WideMLP
from helpers.models.recipe_cases import RECIPES
from helpers.models.snapshot_models import Block, SwigluMLP, capture_training, compiled_run, kernels_everywhere
from helpers.slow import slow_but
from torch import Tensor, nn
from torch.fx import Graph
from torch.utils.checkpoint import checkpoint

from te_dynamo import backend
from te_dynamo.passes.dialect import late_weight_gradients
from te_dynamo.passes.dialect.live_memory import peak_bytes
from te_dynamo.testing import capture_on_fake_cuda


@pytest.fixture(autouse=True)
def small_tensors_count() -> Iterator[None]:
    with (
        torch._inductor.config.patch(force_disable_caches=True),
        mock.patch.object(late_weight_gradients, "FEWEST_BYTES", 4096),
    ):
        yield


class CheckpointedMLP(SwigluMLP):
    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(super().forward, x, use_reentrant=False)


class CheckpointedBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class CheckpointedWideMLP(WideMLP):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


def test_backward_graph() -> None:
    """down's dgrad, the columns of its input, the gated unit's gradients, the columns of dy, down's wgrad."""
    graphs = capture_training(CheckpointedMLP, (256, 64), "cpu")
    kernels = [line for line in graphs["backward"].splitlines() if "= te." in line]
    assert_expected_inline(
        "\n".join(kernels),
        """\
rms_norm_quantize: (f32[256], f8e4m3[256, 64], f8e4m3[64, 256], f32[1]) = te.rms_norm_quantize(x, norm.weight, 1e-05, cast_before_weight=False, zero_centered=False, quantizer=e4m3[row+column], keep_output=False)
quantize_stacked: (f8e4m3[256, 64], f32[2]) = te.quantize_stacked([gate.weight, up.weight], e4m3[row], by_columns=False)
gemm_gated: (bf16[256, 256], f32[512]) = te.gemm_gated([rms_norm_quantize[1], rms_norm_quantize[3]], e4m3[row], [quantize_stacked[0], quantize_stacked[1]], e4m3[row], fast_accum=False, gate=0, kind='silu')
quantize: (f8e5m2[256, 64], f32[1]) = te.quantize(tangents_1, e5m2[row])
quantize_1: (f8e4m3[128, 64], f32[1]) = te.quantize(down.weight, e4m3[column])
gemm: bf16[256, 128] = te.gemm([quantize[0], quantize[1]], e5m2[row], [quantize_1[0], quantize_1[1]], e4m3[column], bf16, fast_accum=False)
gated_quantize: (f8e4m3[128, 256], f32[1]) = te.gated_quantize(slice, slice_1, 'silu', e4m3[column], keep_output=False, amax=gemm_gated[1])
gated_backward_quantize: (f8e5m2[256, 256], f32[2]) = te.gated_backward_quantize(gemm, slice, slice_1, 'silu', e5m2[row], keep_output=False, stacked=True)
quantize_2: (f8e5m2[64, 256], f32[1]) = te.quantize(tangents_1, e5m2[column])
gemm_1: bf16[64, 128] = te.gemm([quantize_2[0], quantize_2[1]], e5m2[column], [gated_quantize[0], gated_quantize[1]], e4m3[column], bf16, fast_accum=False)
quantize_stacked_1: (f8e4m3[64, 256], f32[2]) = te.quantize_stacked([gate.weight, up.weight], e4m3[column], by_columns=False)
gemm_2: bf16[256, 64] = te.gemm([gated_backward_quantize[0], gated_backward_quantize[1]], e5m2[row], [quantize_stacked_1[0], quantize_stacked_1[1]], e4m3[column], bf16, fast_accum=False, along='K', segments=[128, 128])
transpose: f8e5m2[256, 256] = te.transpose(gated_backward_quantize[0])
gemm_3: bf16[256, 64] = te.gemm([transpose, gated_backward_quantize[1]], e5m2[column], [rms_norm_quantize[2], rms_norm_quantize[3]], e4m3[column], bf16, fast_accum=False, along='M', segments=[128, 128])""",
    )


@pytest.mark.one_fast_case
@pytest.mark.parametrize(
    "model, shape",
    [(CheckpointedMLP, (256, 64)), pytest.param(CheckpointedBlock, (2, 128, 64), marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("recipe", slow_but(4, [name for name in RECIPES if "high_precision" not in name]))
def test_every_bit_is_the_same(recipe: str, model: type[nn.Module], shape: tuple[int, ...]) -> None:
    x = torch.randn(*shape, dtype=torch.bfloat16)
    options = {"codegen": "eager", "recipe": None, "rules": [("", RECIPES[recipe])]}
    expected = compiled_run(model, {**options, "low_memory": False})(x).gradients
    rewritten = []

    def rewrite(graph: Graph) -> None:
        rewritten.append(late_weight_gradients.make_weight_gradients_late(graph))

    with mock.patch.object(backend, "make_weight_gradients_late", rewrite):
        actual = compiled_run(model, options)(x).gradients
    assert any(rewritten) == ("wgrad='bf16'" not in recipe)  # which multiplies no codes
    for name, gradient in expected.items():
        assert torch.equal(actual[name], gradient), name


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["float8_current_scaling", "float8_block_scaling"])
def test_peak_of_a_checkpointed_mlp_is_below_bf16s(recipe: str) -> None:
    def peak(recipe: str | None, **options: object) -> int:
        with kernels_everywhere():
            graphs = capture_on_fake_cuda(
                lambda: CheckpointedWideMLP().bfloat16(),
                lambda device: (torch.empty(TOKENS, WIDTH, dtype=torch.bfloat16, device=device, requires_grad=True),),
                options={"recipe": None, "rules": [("", recipe)], **options},
            )
        return peak_bytes(graphs.graph("lower.backward"))

    bf16 = peak(None)
    assert peak(recipe) < bf16 < peak(recipe, low_memory=False)
