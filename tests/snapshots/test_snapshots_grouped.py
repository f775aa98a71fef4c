"""Every stage of a mixture's experts: grouped GEMMs, and the fusion between them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from helpers.models.snapshot_models import kernels_everywhere, launches
from torch import nn

from te_dynamo.inspect.graphs.capture import Captured, capture
from te_dynamo.testing import capture_on_fake_cuda


class Experts(nn.Module):
    """Gate and up projection as transformers stores them, [G, N, K]; the down projection as torch takes it, [G, K, N]."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.randn(4, 256, 64))
        self.down = nn.Parameter(torch.randn(4, 128, 64))

    def forward(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        gate, up = F.grouped_mm(x, self.gate_up.transpose(-2, -1), offs=ends).chunk(2, dim=-1)
        return F.grouped_mm(F.silu(gate) * up, self.down, offs=ends)


def inputs(device: torch.device | str) -> tuple[torch.Tensor, ...]:
    x = torch.ones(48, 64, dtype=torch.bfloat16, device=device, requires_grad=True)
    return x, torch.full((4,), 48, dtype=torch.int32, device=device)


@pytest.fixture(scope="module")
def graphs() -> dict[str, str]:
    """{stage: text} of training, on the CPU."""
    torch._dynamo.reset()
    run = torch.compile(Experts().bfloat16(), backend="te", options={"codegen": "eager"})
    with capture() as captured:
        run(*inputs("cpu")).sum().backward()
    return {stage: captured[stage] for stage in captured.stages}


@pytest.fixture(scope="module")
def lowered() -> Captured:
    """The graphs of training on fake CUDA tensors, down to the launches."""
    with kernels_everywhere():
        return capture_on_fake_cuda(
            lambda: Experts().bfloat16(),
            inputs,
            backward=True,
            options={"codegen": "inductor", "rules": [("", "float8_current_scaling")]},
        )


def test_match(graphs: dict[str, str]) -> None:
    """The transposition of the stored weight is gone, and swiglu is taken because a grouped linear reads it."""
    assert_expected_inline(
        graphs["match"],
        """\
gate_up: bf16[4, 256, 64] = input
x: bf16[48, 64] = input
ends: i32[4] = input
down: bf16[4, 128, 64] = input
grouped_linear: (bf16[48, 256], f8e4m3[64, 48], f32[1], f8e4m3[4, 64, 256], f32[4]) = te.grouped_linear(x, gate_up, ends, grouped linear(x e4m3[row+column], w grouped e4m3[row+column], dy e5m2[row+column]))
chunk: (bf16[48, 128], bf16[48, 128]) = grouped_linear[0].chunk(2, dim=-1)
gated: bf16[48, 128] = te.gated(chunk[0], chunk[1], 'silu')
grouped_linear_1: (bf16[48, 64], f8e4m3[128, 48], f32[1], f8e4m3[4, 128, 64], f32[4]) = te.grouped_linear(gated, down, ends, grouped linear(x e4m3[row+column], w grouped e4m3[row+column], dy e5m2[row+column]) of [G, K, N])
return grouped_linear_1[0]""",
    )


def test_joint(graphs: dict[str, str]) -> None:
    """Of weights [G, N, K] fprop reads the data and dgrad the transpose, of weights [G, K, N] the other way round."""
    assert_expected_inline(
        graphs["joint"],
        """\
gate_up: bf16[4, 256, 64] = input
x: bf16[48, 64] = input
ends: i32[4] = input
down: bf16[4, 128, 64] = input
tangents_1: bf16[48, 64] = input
quantize: (f8e4m3[48, 64], f8e4m3[64, 48], f32[1]) = te.quantize(x, e4m3[row+column])
quantize_1: (f8e4m3[4, 256, 64], f8e4m3[4, 64, 256], f32[4]) = te.quantize(gate_up, grouped e4m3[row+column])
grouped_gemm: bf16[48, 256] = te.grouped_gemm([quantize[0], quantize[2]], e4m3[row], [quantize_1[0], quantize_1[2]], grouped e4m3[row], ends, bf16, fast_accum=False)
split: (bf16[48, 128], bf16[48, 128]) = aten.split(grouped_gemm, 128, -1)
gated: bf16[48, 128] = te.gated(split[0], split[1], 'silu')
quantize_2: (f8e4m3[48, 128], f8e4m3[128, 48], f32[1]) = te.quantize(gated, e4m3[row+column])
quantize_3: (f8e4m3[4, 128, 64], f8e4m3[4, 64, 128], f32[4]) = te.quantize(down, grouped e4m3[row+column])
grouped_gemm_1: bf16[48, 64] = te.grouped_gemm([quantize_2[0], quantize_2[2]], e4m3[row], [quantize_3[1], quantize_3[2]], grouped e4m3[column], ends, bf16, fast_accum=False)
quantize_4: (f8e5m2[48, 64], f8e5m2[64, 48], f32[1]) = te.quantize(tangents_1, e5m2[row+column])
grouped_gemm_2: bf16[48, 128] = te.grouped_gemm([quantize_4[0], quantize_4[2]], e5m2[row], [quantize_3[0], quantize_3[2]], grouped e4m3[row], ends, bf16, fast_accum=False)
grouped_gemm_3: bf16[4, 128, 64] = te.grouped_gemm([quantize_2[1], quantize_2[2]], e4m3[column], [quantize_4[1], quantize_4[2]], e5m2[column], ends, bf16, fast_accum=False)
gated_backward: (bf16[48, 128], bf16[48, 128]) = te.gated_backward(grouped_gemm_2, split[0], split[1], 'silu')
cat: bf16[48, 256] = aten.cat([gated_backward[0], gated_backward[1]], 1)
quantize_5: (f8e5m2[48, 256], f8e5m2[256, 48], f32[1]) = te.quantize(cat, e5m2[row+column])
grouped_gemm_4: bf16[48, 64] = te.grouped_gemm([quantize_5[0], quantize_5[2]], e5m2[row], [quantize_1[1], quantize_1[2]], grouped e4m3[column], ends, bf16, fast_accum=False)
grouped_gemm_5: bf16[4, 256, 64] = te.grouped_gemm([quantize_5[1], quantize_5[2]], e5m2[column], [quantize[1], quantize[2]], e4m3[column], ends, bf16, fast_accum=False)
return grouped_gemm_1, grouped_gemm_5, grouped_gemm_4, None, grouped_gemm_3""",
    )


def test_forward(graphs: dict[str, str]) -> None:
    """swiglu writes FP8, for the second grouped GEMM and for its wgrad."""
    assert_expected_inline(
        graphs["forward"],
        """\
gate_up: bf16[4, 256, 64] = input
x: bf16[48, 64] = input
ends: i32[4] = input
down: bf16[4, 128, 64] = input
quantize: (f8e4m3[48, 64], f8e4m3[64, 48], f32[1]) = te.quantize(x, e4m3[row+column])
quantize_1: (f8e4m3[4, 256, 64], f8e4m3[4, 64, 256], f32[4]) = te.quantize(gate_up, grouped e4m3[row+column])
grouped_gemm: bf16[48, 256] = te.grouped_gemm([quantize[0], quantize[2]], e4m3[row], [quantize_1[0], quantize_1[2]], grouped e4m3[row], ends, bf16, fast_accum=False)
split: (bf16[48, 128], bf16[48, 128]) = aten.split(grouped_gemm, 128, -1)
gated_quantize: (f8e4m3[48, 128], f8e4m3[128, 48], f32[1]) = te.gated_quantize(split[0], split[1], 'silu', e4m3[row+column], keep_output=False)
quantize_2: (f8e4m3[4, 128, 64], f8e4m3[4, 64, 128], f32[4]) = te.quantize(down, grouped e4m3[row+column])
grouped_gemm_1: bf16[48, 64] = te.grouped_gemm([gated_quantize[0], gated_quantize[2]], e4m3[row], [quantize_2[1], quantize_2[2]], grouped e4m3[column], ends, bf16, fast_accum=False)
return grouped_gemm_1, ends, quantize[1], quantize[2], quantize_1[1], quantize_1[2], split[0], split[1], gated_quantize[1], gated_quantize[2], quantize_2[0], quantize_2[2]""",
    )


def test_backward(graphs: dict[str, str]) -> None:
    assert_expected_inline(
        graphs["backward"],
        """\
ends: i32[4] = input
quantize[1]: f8e4m3[64, 48] = input
quantize[2]: f32[1] = input
quantize_1[1]: f8e4m3[4, 64, 256] = input
quantize_1[2]: f32[4] = input
split[0]: bf16[48, 128] = input
split[1]: bf16[48, 128] = input
gated_quantize[1]: f8e4m3[128, 48] = input
gated_quantize[2]: f32[1] = input
quantize_2[0]: f8e4m3[4, 128, 64] = input
quantize_2[2]: f32[4] = input
tangents_1: bf16[48, 64] = input
quantize_3: (f8e5m2[48, 64], f8e5m2[64, 48], f32[1]) = te.quantize(tangents_1, e5m2[row+column])
grouped_gemm: bf16[48, 128] = te.grouped_gemm([quantize_3[0], quantize_3[2]], e5m2[row], [quantize_2[0], quantize_2[2]], grouped e4m3[row], ends, bf16, fast_accum=False)
grouped_gemm_1: bf16[4, 128, 64] = te.grouped_gemm([gated_quantize[1], gated_quantize[2]], e4m3[column], [quantize_3[1], quantize_3[2]], e5m2[column], ends, bf16, fast_accum=False)
gated_backward_quantize_halves: (f8e5m2[48, 256], f32[1]) = te.gated_backward_quantize_halves(grouped_gemm, split[0], split[1], 'silu', e5m2[row], keep_output=False, gate_first=True)
grouped_gemm_2: bf16[48, 64] = te.grouped_gemm([gated_backward_quantize_halves[0], gated_backward_quantize_halves[1]], e5m2[row], [quantize_1[1], quantize_1[2]], grouped e4m3[column], ends, bf16, fast_accum=False)
transpose: f8e5m2[256, 48] = te.transpose(gated_backward_quantize_halves[0])
grouped_gemm_3: bf16[4, 256, 64] = te.grouped_gemm([transpose, gated_backward_quantize_halves[1]], e5m2[column], [quantize[1], quantize[2]], e4m3[column], ends, bf16, fast_accum=False)
return grouped_gemm_3, grouped_gemm_2, None, grouped_gemm_1""",
    )


def test_launches(lowered: Captured) -> None:
    """Two launches quantize, one multiplies; swiglu's kernels write what the second GEMM reads."""
    assert_expected_inline(
        launches(lowered["lower.forward"]),
        """\
quantize_amax_kernel -> partials
quantize_cast_kernel -> data, transpose, scale_inv
quantize_amax_kernel -> partials
quantize_cast_kernel -> data, transpose, scale_inv
gemm_grouped_kernel -> c
produce_amax_kernel -> partials
produce_write_kernel -> data, transpose, scale_inv
quantize_amax_kernel -> partials
quantize_cast_kernel -> data, transpose, scale_inv
gemm_grouped_kernel -> c""",
    )
    assert_expected_inline(
        launches(lowered["lower.backward"]),
        """\
quantize_amax_kernel -> partials
quantize_cast_kernel -> data, transpose, scale_inv
gemm_grouped_kernel -> c
gemm_grouped_kernel -> c
produce_amax_kernel -> partials
gated_backward_rows_kernel -> dy, scale_inv
gemm_grouped_kernel -> c
transpose_kernel -> transpose
gemm_grouped_kernel -> c""",
    )


def test_blocks_begin_at_the_groups_borders() -> None:
    """In block scaling: columns by groups beside the rows, and products by weights that are one matrix."""
    with kernels_everywhere():
        captured = capture_on_fake_cuda(
            lambda: Experts().bfloat16(),
            inputs,
            backward=True,
            options={"codegen": "inductor", "rules": [("", "float8_block_scaling")]},
        )
    assert_expected_inline(
        captured["forward"],
        """\
gate_up: bf16[4, 256, 64] = input
x: bf16[48, 64] = input
ends: i32[4] = input
down: bf16[4, 128, 64] = input
quantize: (f8e4m3[48, 64], f32[1, 48]) = te.quantize(x, e4m3 1x128[row])
quantize_1: (f8e4m3[1024, 64], f32[8, 4], f8e4m3[64, 1024], f32[1, 8]) = te.quantize(gate_up, e4m3 128x128[row+column])
grouped_gemm: bf16[48, 256] = te.grouped_gemm([quantize[0], quantize[1]], e4m3 1x128[row], [quantize_1[0], quantize_1[1]], e4m3 128x128[row], ends, bf16, fast_accum=False)
split: (bf16[48, 128], bf16[48, 128]) = aten.split(grouped_gemm, 128, -1)
gated_quantize: (bf16[48, 128], f8e4m3[48, 128], f32[1, 48]) = te.gated_quantize(split[0], split[1], 'silu', e4m3 1x128[row], keep_output=True)
quantize_2: (f8e4m3[512, 64], f32[4, 4], f8e4m3[64, 512], f32[1, 4]) = te.quantize(down, e4m3 128x128[row+column])
grouped_gemm_1: bf16[48, 64] = te.grouped_gemm([gated_quantize[1], gated_quantize[2]], e4m3 1x128[row], [quantize_2[2], quantize_2[3]], e4m3 128x128[column], ends, bf16, fast_accum=False)
return grouped_gemm_1, x, ends, quantize_1[2], quantize_1[3], split[0], split[1], gated_quantize[0], quantize_2[0], quantize_2[1]""",
    )
    assert_expected_inline(
        launches(captured["lower.backward"]),
        """\
quantize_block_kernel -> transpose, columnwise_scale_inv
quantize_block_kernel -> data, scale_inv
gemm_grouped_kernel -> c
quantize_block_kernel -> transpose, columnwise_scale_inv
gemm_grouped_kernel -> c
produce_kernel -> y, data, scale_inv
quantize_block_kernel -> transpose, columnwise_scale_inv
gemm_grouped_kernel -> c
quantize_block_kernel -> transpose, columnwise_scale_inv
gemm_grouped_kernel -> c""",
    )
